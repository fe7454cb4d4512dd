"""Adapters of one weight, in slots; and which rows of a launch use which."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.matmul.packed import Packed, Recipe

NONE = -1
"""The slot of a row without an adapter."""


@dataclass(slots=True, eq=False)
class AdapterSlots:
    """Low-rank pairs A [r, K], B [N, r] and their scales, for one weight [N, K].

    On a card `a` [slots, R, K], `b` [slots, N, R] and `scale` float32 [slots] keep their addresses, so that a captured
    graph sees what is loaded; ranks under R are padded with zeros. On the CPU `each` holds packed pairs.
    """

    recipe: Recipe
    slots: int
    rank: int  #: R, the largest rank that fits
    scale: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    each: list[tuple[Packed, Packed] | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which slot each row of a launch uses; made once a forward, used by every adapted weight.

    On the CPU `rows` lists the rows of each slot that has any. On a card the rows are sorted into tiles.
    """

    rows: tuple[tuple[int, Tensor], ...] = ()
    tiles: tuple[Tensor, ...] = ()
    tile_rows: int = 0


def check(slots: AdapterSlots, a: Tensor, b: Tensor) -> int:
    """The rank of a pair. Raises ValueError when it does not fit."""
    rank = a.shape[0]
    if b.shape[1] != rank or rank > slots.rank:
        raise ValueError(f"ranks {a.shape[0]} and {b.shape[1]} do not agree or pass {slots.rank}")
    return rank


def padded(matrix: Tensor, rank: int, dim: int) -> Tensor:
    """Zeros behind the last rank, up to `rank`."""
    short = rank - matrix.shape[dim]
    return torch.nn.functional.pad(matrix, (0, short) if dim == 1 else (0, 0, 0, short))
