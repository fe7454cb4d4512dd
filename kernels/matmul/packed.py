"""Weights laid out for a recipe: what `pack` returns and `linear` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Recipe = Literal["onednn", "tiled", "card", "card-fp8", "padded", "free"]
"""`onednn`, `tiled`: float32 on the CPU. `card`, `card-fp8`: our kernels, bfloat16 or float8 weights. `padded`: cuBLAS on
64 rows, the exact baseline. `free`: cuBLAS on the rows as they come, which is not row-exact; the bench compares with it."""


class NotRowExact(RuntimeError):
    """No recipe keeps the bits of a row on this machine."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [out, in] laid out for `recipe`."""

    weight: Tensor
    recipe: Recipe
    out_features: int
    in_features: int
    pairs: bool = False
    """A fused [gate; up] weight, for `linear_swiglu` alone."""
    scale: Tensor | None = None
    """float32 [out], the factor of each output channel of a float8 weight, in the order of the stored rows."""
