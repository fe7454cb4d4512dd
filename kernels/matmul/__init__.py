"""y = x @ weight.T with row-exact bits: packing, the product, and the self-test that picks the CPU's recipe."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import device_module, on_card
from kernels.matmul import reference
from kernels.matmul.packed import NotRowExact, Packed, Recipe
from kernels.matmul.reference import choose_recipe, row_exact

__all__ = [
    "NotRowExact",
    "Packed",
    "Recipe",
    "choose_recipe",
    "linear",
    "linear_parts",
    "linear_swiglu",
    "pack",
    "row_exact",
]


def pack(weight: Tensor, recipe: Recipe, *, pairs: bool = False) -> Packed:
    """Lay out a weight [N, K]. `pairs`: its rows are [gate; up] and only `linear_swiglu` will use it."""
    if on_card(weight):
        return device_module("matmul").pack(weight, recipe, pairs=pairs)
    return reference.pack(weight, recipe, pairs=pairs)


def linear(
    x: Tensor, packed: Packed, *, prefill: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """[M, K] contiguous -> [M, N] in `out_dtype`, by default x's own.

    `prefill` names the phase, whose tiles and bits may be others; the row count never does.
    """
    if on_card(packed.weight):
        return device_module("matmul").linear(x, packed, prefill=prefill, out_dtype=out_dtype)
    return reference.linear(x, packed)


def linear_parts(x: Tensor, packed: Packed, *, prefill: bool = False) -> Tensor:
    """[M, K] contiguous -> `linear`'s [M, N] in x's dtype, or float32 [slices, M, N]: parts whose sum in slice order, rounded
    once, has its bits. For `norm_rope.add_rms_norm`, which takes either."""
    if on_card(packed.weight):
        return device_module("matmul").linear_parts(x, packed, prefill=prefill)
    return reference.linear(x, packed)


def linear_swiglu(x: Tensor, packed: Packed, *, prefill: bool = False) -> Tensor:
    """[M, K] contiguous -> silu(gate) * up, [M, N / 2], of a weight packed with `pairs`; rounded once."""
    if on_card(packed.weight):
        return device_module("matmul").linear_swiglu(x, packed, prefill=prefill)
    return reference.linear_swiglu(x, packed)
