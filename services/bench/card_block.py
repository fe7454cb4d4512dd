"""A block drafter of random weights beside a shape, drawn on the card: five sliding layers as wide as the trunk's, blocks of
eight, as the published drafters of models of this size have them."""

from __future__ import annotations

from typing import Any, Final

import torch

from services.gpu_worker.engine.config import SLIDING, ModelDims
from services.gpu_worker.engine.models.block import BlockDrafter
from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.models.block_tensors import block_shapes
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.models.random_block import block_hf_config

LAYERS: Final = 5
BLOCK: Final = 8
WINDOW: Final = 2048
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
MOST_POSITIONS: Final = 8192
"""Of the drafter's RoPE table, which need not reach as far as the trunk's."""


def drawn_drafter(loaded: LoadedModel) -> BlockDrafter:
    """Matrices that keep the scale of their input, norms of one; where the model is and in its type."""
    dims, placement = BlockDims.from_hf(_config(loaded.dims)), loaded.model.placement
    weights = {}
    for name, shape in block_shapes(dims).items():
        drawn = torch.empty(shape, dtype=placement.dtype, device=placement.device)
        weights[name] = drawn.fill_(1.0) if len(shape) == 1 else drawn.normal_(std=shape[-1] ** -0.5)
    return BlockDrafter(dims, weights, placement, loaded.model.recipe)


def _config(target: ModelDims) -> dict[str, Any]:
    last = len(target.layer_types) - 1
    return block_hf_config(
        target,
        block_size=BLOCK,
        target_layer_ids=sorted({last * tap // (LAYERS - 1) for tap in range(LAYERS)}),
        intermediate_size=target.intermediate or 2 * target.hidden,
        num_hidden_layers=LAYERS,
        layer_types=[SLIDING] * LAYERS,
        sliding_window=WINDOW,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=min(target.max_positions, MOST_POSITIONS),
        dflash_config={"selector_rank": 64, "selector_top_k": 16},
    )
