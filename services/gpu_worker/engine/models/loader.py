"""From a Hugging Face folder (config.json, safetensors) to a model in its place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.checkpoint import Checkpoint, read_json
from services.gpu_worker.engine.models.hybrid import HybridModel, matmul_shapes
from services.gpu_worker.engine.models.tensors import checkpoint_shapes
from services.gpu_worker.engine.placement import CPU, Placement
from shared.errors import EngineFault

MODEL_TYPES = frozenset({"qwen3_5", "qwen3_5_text"})
_GENERATION = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model ready to run, and what its folder says about generation."""

    dims: ModelDims
    model: HybridModel
    """What `ModelRunner` takes."""
    weights_digest: str
    """SHA-256, hex, over the names, shapes, dtypes and bytes of all tensors used."""
    eos_ids: frozenset[int]
    generation_defaults: dict[str, float | int | bool]
    """do_sample, temperature, top_k, top_p, min_p, repetition_penalty, as far as the folder names them."""


def load_model(folder: Path, *, threads: int = 1, placement: Placement = CPU) -> LoadedModel:
    """Read the folder's safetensors (one file or an index) tensor by tensor into a model.

    Sets torch's intra-op threads, then takes the placement's matmul recipe for these shapes. Accepts the
    `model.language_model.` prefix; without `mtp.*` tensors `dims.has_mtp` is false. Raises `EngineFault` naming the
    file, tensor, expected and actual shape.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if config.get("model_type") not in MODEL_TYPES:
        raise EngineFault(
            f"{folder}: model_type {config.get('model_type')!r} is none of {sorted(MODEL_TYPES)}"
        )
    checkpoint = Checkpoint(folder)
    dims = ModelDims.from_hf(config, has_mtp=_has_mtp(checkpoint, folder))
    weights, digest = checkpoint.load(checkpoint_shapes(dims))
    torch.set_num_threads(threads)
    recipe = placement.recipe_for(matmul_shapes(dims))
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return LoadedModel(
        dims=dims,
        model=HybridModel(dims, weights, recipe, placement),
        weights_digest=digest,
        eos_ids=_eos(generation.get("eos_token_id", config.get("eos_token_id")), folder),
        generation_defaults={
            name: value
            for name in _GENERATION
            if isinstance(value := generation.get(name), (bool, int, float))
        },
    )


def _has_mtp(checkpoint: Checkpoint, folder: Path) -> bool:
    names = [name for name in checkpoint.names() if name.startswith("mtp.")]
    deeper = sorted(
        name for name in names if name.startswith("mtp.layers.") and not name.startswith("mtp.layers.0.")
    )
    if deeper:
        raise EngineFault(f"{folder}: an MTP head of one layer is expected, found {deeper[0]}")
    return bool(names)


def _eos(value: object, folder: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise EngineFault(f"{folder}: eos_token_id must be an id or a list of ids, not {value!r}")
    return frozenset(ids)
