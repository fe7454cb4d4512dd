"""What a mixture's products are made of: routes, and the experts' weights laid out for a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kernels.matmul.packed import Packed, Recipe


class Routes(NamedTuple):
    """Which experts a row goes to, in router-rank order: the largest logit first, ties by the smallest id."""

    ids: Tensor
    """int32 [M, k]."""
    weights: Tensor
    """float32 [M, k]."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Gate, up and down weights of E experts of width I over H.

    On a card two tensors of all experts, [E, 2I, H] (gate and up rows alternate) and [E, H, I]; on the CPU one
    packed pair an expert.
    """

    recipe: Recipe
    experts: int
    hidden: int
    width: int
    gate_up: Tensor | None = None
    down: Tensor | None = None
    each: tuple[tuple[Packed, Packed], ...] = ()
