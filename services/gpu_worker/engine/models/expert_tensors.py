"""Experts that a checkpoint stores one by one, `{at}{e}.{gate, up, down}_proj.weight`, as the layers want them: stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.tensors import Shapes, mlp_shapes

_PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_STACKED: Final = ("experts.gate_up_proj", "experts.down_proj")


def expert_shapes(at: str, dims: ModelDims) -> Shapes:
    """Of all experts of a layer; `at` ends in `experts.`."""
    shapes: Shapes = {}
    for expert in range(dims.experts):
        shapes |= mlp_shapes(dims.hidden, dims.expert_width, f"{at}{expert}.")
    return shapes


def one_by_one(shapes: Shapes, dims: ModelDims, stacked: Callable[[str], bool] = lambda _: False) -> Shapes:
    """The same with experts that are stored one by one, but for layers whose tensors are `stacked`."""
    out: Shapes = {}
    for name, shape in shapes.items():
        if not name.endswith(_STACKED) or stacked(name):
            out[name] = shape
        elif name.endswith(_STACKED[0]):
            out |= expert_shapes(name.removesuffix("gate_up_proj"), dims)
    return out


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


class StackedExperts(Mapping[str, Tensor]):
    """Tensors as they are stored, experts stacked when they are asked for."""

    def __init__(self, stored: Mapping[str, Tensor], count: int) -> None:
        self._stored = stored
        self._count = count

    def __getitem__(self, name: str) -> Tensor:
        if name.endswith(_STACKED) and name not in self._stored:
            return stacked_experts(self._stored, name, self._count)
        return self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)
