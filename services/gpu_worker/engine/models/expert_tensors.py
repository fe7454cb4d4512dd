"""Experts that a checkpoint stores one by one, `{at}{e}.{gate, up, down}_proj.weight`, as the layers want them: stacked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.tensors import Shapes, mlp_shapes

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def expert_shapes(at: str, dims: ModelDims) -> Shapes:
    """Of all experts of a layer; `at` ends in `experts.`."""
    shapes: Shapes = {}
    for expert in range(dims.experts):
        shapes |= mlp_shapes(dims.hidden, dims.expert_width, f"{at}{expert}.")
    return shapes


def stacked_experts(stored: Mapping[str, Tensor], name: str, count: int) -> Tensor:
    """`...experts.gate_up_proj` [E, 2I, H] or `...experts.down_proj` [E, H, I], one expert after the other."""
    at, _, part = name.rpartition(".")
    out: Tensor | None = None
    for expert in range(count):
        rows = [stored[f"{at}.{expert}.{piece}.weight"] for piece in _PARTS[part]]
        if out is None:
            out = rows[0].new_empty(count, sum(len(row) for row in rows), rows[0].shape[1])
        torch.cat(rows, out=out[expert])
    if out is None:
        raise ValueError(f"{name}: no experts")
    return out
