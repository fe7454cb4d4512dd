"""Adapters in Triton: rows sorted by slot (`grouping`), A x in fixed slices of K, then B times their ordered sum.

Tiles of rows are a constant of the phase, slices of K of nothing at all. What A makes of a row stays float32.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.grouping import group, items_of, most_tiles
from kernels.launch import PDL
from kernels.lora.slots import AdapterRows, AdapterSlots, check, padded
from kernels.matmul.packed import Recipe
from kernels.tiles import ADAPTER_SLICE

TILE_ROWS: Final = {False: 16, True: 64}
"""By phase: prefill or not."""

_OUTPUTS: Final = 128
_LEAST_RANK: Final = 16


@triton.jit
def _shrink(
    x, a, parts, order, tile_group, tile_start, tile_end, tiles,
    K: tl.constexpr, R: tl.constexpr, SLICE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One slice of A x for one tile: parts float32 [row, slice, R]. Grid (slices, tiles)."""
    piece, tile = tl.program_id(0), tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if tile >= tl.load(tiles):
        return
    _, live, row = items_of(order, tile_start, tile_end, tile, BLOCK_M)
    row = row.to(tl.int64)
    rank = tl.arange(0, R)
    inner = tl.arange(0, BLOCK_K)
    a_at = a + (tl.load(tile_group + tile).to(tl.int64) * R + rank)[None, :] * K
    acc = tl.zeros((BLOCK_M, R), tl.float32)
    for first in range(0, SLICE, BLOCK_K):
        at = piece * SLICE + first + inner
        inside = at < K
        taken = tl.load(x + row[:, None] * K + at[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(taken, tl.load(a_at + at[:, None], mask=inside[:, None], other=0.0), acc)
    parts_at = parts + (row * tl.num_programs(0) + piece)[:, None] * R + rank[None, :]
    tl.store(parts_at, acc, mask=live[:, None])


@triton.jit
def _expand(
    base, parts, b, scale, order, tile_group, tile_start, tile_end, tiles,
    N: tl.constexpr, R: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """base += scale * B (the slices of A x, in order), rounded once. Grid (blocks of N, tiles)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if tile >= tl.load(tiles):
        return
    _, live, row = items_of(order, tile_start, tile_end, tile, BLOCK_M)
    row = row.to(tl.int64)
    rank = tl.arange(0, R)
    low = tl.zeros((BLOCK_M, R), tl.float32)
    for piece in range(SLICES):
        low += tl.load(
            parts + (row * SLICES + piece)[:, None] * R + rank[None, :], mask=live[:, None], other=0.0
        )
    slot = tl.load(tile_group + tile).to(tl.int64)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    weight = tl.load(b + (slot * N + column)[None, :] * R + rank[:, None], mask=inside[None, :], other=0.0)
    delta = tl.dot(low, weight.to(tl.float32), input_precision="ieee") * tl.load(scale + slot)
    at = row[:, None] * N + column[None, :]
    mask = live[:, None] & inside[None, :]
    total = tl.load(base + at, mask=mask, other=0.0).to(tl.float32) + delta
    tl.store(base + at, total.to(base.dtype.element_ty), mask=mask)


def slots(count: int, rank: int, n: int, k: int, recipe: Recipe, like: Tensor) -> AdapterSlots:
    """As the twin; ranks are padded to a power of two, 16 at least."""
    room = max(_LEAST_RANK, triton.next_power_of_2(rank))
    scale = torch.zeros(count, dtype=torch.float32, device=like.device)
    return AdapterSlots(
        recipe, count, room, scale, a=like.new_zeros(count, room, k), b=like.new_zeros(count, n, room)
    )


def load(into: AdapterSlots, slot: int, a: Tensor, b: Tensor, scale: float) -> None:
    """As the twin."""
    check(into, a, b)
    own_a, own_b = _matrices(into)
    own_a[slot].copy_(padded(a, into.rank, 0))
    own_b[slot].copy_(padded(b, into.rank, 1))
    into.scale[slot] = scale


def unload(into: AdapterSlots, slot: int) -> None:
    """As the twin: zeros."""
    for matrix in _matrices(into):
        matrix[slot] = 0
    into.scale[slot] = 0


def rows_of(index: Tensor, count: int, *, prefill: bool = False) -> AdapterRows:
    """As the twin, without a look at the values; `index` keeps its address in a captured graph."""
    rows = TILE_ROWS[prefill]
    return AdapterRows(tiles=tuple(group(index, count, rows)), tile_rows=rows)


def add(base: Tensor, x: Tensor, adapters: AdapterSlots, rows: AdapterRows) -> Tensor:
    """As the twin; `base` [M, N] and `x` [M, K] contiguous."""
    a, b = _matrices(adapters)
    count, k, n = x.shape[0], x.shape[1], base.shape[1]
    most, pieces = most_tiles(count, adapters.slots, rows.tile_rows), triton.cdiv(k, ADAPTER_SLICE)
    parts = torch.empty(count, pieces, adapters.rank, dtype=torch.float32, device=x.device)
    _shrink[(pieces, most)](
        x, a, parts, *rows.tiles, K=k, R=adapters.rank, SLICE=ADAPTER_SLICE, BLOCK_M=rows.tile_rows, BLOCK_K=128,
        num_warps=4, **PDL,
    )  # fmt: skip
    _expand[(triton.cdiv(n, _OUTPUTS), most)](
        base, parts, b, adapters.scale, *rows.tiles, N=n, R=adapters.rank, SLICES=pieces, BLOCK_M=rows.tile_rows,
        BLOCK_N=_OUTPUTS, num_warps=4, **PDL,
    )  # fmt: skip
    return base


def _matrices(adapters: AdapterSlots) -> tuple[Tensor, Tensor]:
    if adapters.a is None or adapters.b is None:
        raise ValueError("adapters laid out for the CPU")
    return adapters.a, adapters.b
