"""Low-rank adapters by row: y = round(base + scale * B (A x)), the sum in float32.

A row without an adapter is not touched: it equals the base model's row bit for bit. A row's delta is a product by
the matmul's recipe, so its bits do not depend on the rows, adapters or slots beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.lora.slots import NONE, AdapterRows, AdapterSlots, check
from kernels.matmul import reference as matmul
from kernels.matmul.packed import Recipe


def slots(count: int, rank: int, n: int, k: int, recipe: Recipe, like: Tensor) -> AdapterSlots:
    """Empty slots for a weight [n, k]; `like` gives device and type."""
    return AdapterSlots(recipe, count, rank, torch.zeros(count), each=[None] * count)


def load(into: AdapterSlots, slot: int, a: Tensor, b: Tensor, scale: float) -> None:
    """Fill a slot with A [r, K], B [N, r]. Raises ValueError when the rank does not fit."""
    check(into, a, b)
    into.each[slot] = matmul.pack(a, into.recipe), matmul.pack(b, into.recipe)
    into.scale[slot] = scale


def unload(into: AdapterSlots, slot: int) -> None:
    """Empty a slot; no row may use it from here on."""
    into.each[slot] = None
    into.scale[slot] = 0.0


def rows_of(index: Tensor, count: int, *, prefill: bool = False) -> AdapterRows:
    """`index` int32 [M]: each row's slot, NONE for none."""
    used = [slot for slot in index.unique().tolist() if slot != NONE]
    return AdapterRows(rows=tuple((slot, (index == slot).nonzero()[:, 0]) for slot in used))


def add(base: Tensor, x: Tensor, adapters: AdapterSlots, rows: AdapterRows) -> Tensor:
    """Adds to `base` [M, N] in place what the rows' adapters make of x [M, K]; answers `base`."""
    for slot, at in rows.rows:
        pair = adapters.each[slot]
        if pair is None:
            raise ValueError(f"slot {slot} holds no adapter")
        delta = matmul.linear(matmul.linear(x[at].contiguous(), pair[0]), pair[1])
        base[at] += adapters.scale[slot] * delta
    return base
