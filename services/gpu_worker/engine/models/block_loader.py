"""From a drafter's folder (config.json, safetensors) to a block drafter beside the target that it was trained for."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.gpu_worker.engine.models.block import BlockDrafter
from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.models.block_tensors import block_shapes, check_names
from services.gpu_worker.engine.models.checkpoint import Checkpoint, read_json
from services.gpu_worker.engine.models.family import Model
from services.gpu_worker.engine.models.kinds import checked
from shared.errors import EngineFault

ID_MAP = "d2t"
"""int64 [draft_vocab]: what is added to an id of the drafter to get the target's."""

MASK_FILE = "mask_embedding.pt"
"""[H]: the embedding of a mask slot, where it is not the target's of `mask_token_id`."""


def load_block(folder: Path, target: Model) -> BlockDrafter:
    """Read a drafter of a published layout. Raises EngineFault naming the field, tensor or file that is missing, wrong,
    contradictory, or not the target's."""
    folder = Path(folder)
    config = checked(read_json(folder / "config.json"))
    dims = BlockDims.from_hf(config)
    dims.check_target(target.dims, config)
    checkpoint = Checkpoint(folder)
    check_names(dims, checkpoint.names(), folder)
    weights, _ = checkpoint.load(block_shapes(dims))
    # Positions beyond the target's context are never asked for.
    dims = replace(dims, max_positions=min(dims.max_positions, target.dims.max_positions))
    return BlockDrafter(
        dims,
        weights,
        target.placement,
        target.recipe,
        ids=_id_map(folder, dims) if dims.draft_vocab < dims.vocab else None,
        mask_row=_mask_row(folder, dims),
    )


def _id_map(folder: Path, dims: BlockDims) -> Tensor:
    """[draft_vocab] target ids, each once."""
    path = folder / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as opened:
            offsets = opened.get_tensor(ID_MAP)
    except (SafetensorError, OSError) as error:
        raise EngineFault(f"{path}: draft_vocab_size needs the tensor {ID_MAP}: {error}") from error
    if tuple(offsets.shape) != (dims.draft_vocab,) or offsets.is_floating_point():
        raise EngineFault(f"{path}: tensor {ID_MAP} must be {dims.draft_vocab} integers")
    ids = torch.arange(dims.draft_vocab) + offsets.long()
    inside = bool((ids >= 0).all() and (ids < dims.vocab).all())
    if not inside or len(ids.unique()) != len(ids):
        raise EngineFault(f"{path}: tensor {ID_MAP} does not map to different ids of the vocabulary")
    return ids


def _mask_row(folder: Path, dims: BlockDims) -> Tensor | None:
    path = folder / MASK_FILE
    if not path.exists():
        return None
    try:
        row = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise EngineFault(f"{path}: not readable as a tensor: {error}") from error
    if not isinstance(row, Tensor) or row.numel() != dims.hidden:
        raise EngineFault(f"{path}: a tensor of {dims.hidden} values is expected")
    return row.flatten().float()
