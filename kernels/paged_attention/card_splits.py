"""Decode and verify attention on a card: absolute splits of 256 keys side by side, then their ordered sum.

A program takes a tile of (column, head of the group) rows of one KV head over one split, page by page with a running
maximum, and leaves (m, l, acc) in float32. Both products have the keys, then the head's elements, on the side where the
tensor cores want 64, so that a tile may have 16 rows. The second launch adds the splits of a row in a fixed order. Split
bounds are positions, so a row's bits do not know how long its neighbours are, nor how many columns run with it: a page that
a row does not see scales its sums by exactly 1 and adds exactly 0.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import PDL
from kernels.paged_attention.card_pages import LOG2E, pages, precision
from kernels.paged_attention.plan import CardAttention
from kernels.tiles import ROWS, SPLIT_ROWS

_TILES: Final = (16, 32, 64)
"""Rows that a query tile can have: columns x heads of the group, as many whole columns as fit. A row has the same bits in
each, because a tile's rows are the free side of both products."""

_WIDE: Final = 32
"""The tile of many columns. 64 is for groups that fill no less: its accumulators cost more than the keys read twice."""

_BLOCK: Final = 8
"""Splits that the sum takes at a time."""


@triton.jit(do_not_specialize=["columns", "table_row", "splits", "window"])
def _split_kernel(
    query,
    keys,
    values,
    peaks,
    sums,
    parts,
    tables,
    starts,
    counts,
    columns,
    table_row,
    splits,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (split, KV head and query tile, sequence)."""
    if OVERLAP:
        gdc_launch_dependents()
    group: tl.constexpr = HEADS // KV_HEADS
    width: tl.constexpr = TILE // group
    split, sequence = tl.program_id(0), tl.program_id(2)
    kv_head, first = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS * width
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    last_key = start + tl.minimum(first + width, count) - 1
    first_key = tl.where(window > 0, tl.maximum(start + first - window + 1, 0), 0)
    base = split * SPLIT
    if OVERLAP:
        gdc_wait()
    if (first >= count) | (base > last_key) | (base + SPLIT <= first_key):
        return
    r = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    p = tl.arange(0, PAGE)
    column = first + r // group
    real = (r < width * group) & (column < count)
    row = (sequence.to(tl.int64) * columns + column) * HEADS + kv_head * group + r % group
    held = real[:, None] & (d < D)[None, :]
    q = tl.trans(tl.load(query + row[:, None] * D + d[None, :], mask=held, other=0.0))
    position = (start + column)[None, :]
    lowest = tl.where(window > 0, position - window, -1)
    peak = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([BLOCK_D, TILE], tl.float32)
    from_page = tl.maximum(first_key - base, 0) // PAGE
    to_page = (tl.minimum(last_key - base, SPLIT - 1)) // PAGE + 1
    for page in range(from_page, to_page):
        block = tl.load(tables + sequence * table_row + base // PAGE + page)
        at = (block * KV_HEADS + kv_head) * PAGE
        k = keys.load([at, 0])
        v = values.load([at, 0])
        key = (base + page * PAGE + p)[:, None]
        scores = tl.dot(k, q, input_precision=PRECISION)
        scores = tl.where((key <= position) & (key > lowest), scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=0))
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2((scores - finite[None, :]) * LOG2E)
        shrink = tl.exp2((peak - finite) * LOG2E)
        total = total * shrink + tl.sum(weights, axis=0)
        acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * shrink[None, :], input_precision=PRECISION)
        peak = higher
    at = row * splits + split
    tl.store(peaks + at, peak, mask=real)
    tl.store(sums + at, total, mask=real)
    tl.store(parts + at[:, None] * D + d[None, :], tl.trans(acc), mask=held)


@triton.jit(do_not_specialize=["columns", "splits", "window"])
def _combine_kernel(
    peaks,
    sums,
    parts,
    gate,
    out,
    starts,
    counts,
    columns,
    splits,
    window,
    GATE_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row, head): the row's splits, `BLOCK` absolute ones at a time, then the gate."""
    if OVERLAP:
        gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    sequence, t = row // columns, row % columns
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    here = row.to(tl.int64) * HEADS + head
    count, position = tl.load(counts + sequence), tl.load(starts + sequence) + t
    if OVERLAP:
        gdc_wait()
    if t >= count:
        tl.store(out + here * D + d, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=inside)
        return
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0) // SPLIT
    last = position // SPLIT
    n = tl.arange(0, BLOCK)
    at = here * splits + n
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    for block in range(first // BLOCK, last // BLOCK + 1):
        known = (block * BLOCK + n >= first) & (block * BLOCK + n <= last)
        peak = tl.maximum(peak, tl.load(peaks + at + block * BLOCK, mask=known, other=-float("inf")))
    highest = tl.max(peak, axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for block in range(first // BLOCK, last // BLOCK + 1):
        known = (block * BLOCK + n >= first) & (block * BLOCK + n <= last)
        own = at + block * BLOCK
        weight = tl.exp2((tl.load(peaks + own, mask=known, other=-float("inf")) - highest) * LOG2E)
        total += weight * tl.load(sums + own, mask=known, other=0.0)
        held = known[:, None] & inside[None, :]
        part = tl.load(parts + own[:, None] * D + d[None, :], mask=held, other=0.0)
        acc += tl.sum(part * weight[:, None], axis=0)
    result = acc / tl.sum(total, axis=0)
    if GATED:
        x = tl.load(gate + row.to(tl.int64) * GATE_ROW + head * D + d, mask=inside, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-x))
    tl.store(out + here * D + d, result.to(out.dtype.element_ty), mask=inside)


def attend(query: Tensor, keys: Tensor, values: Tensor, card: CardAttention, gate: Tensor | None) -> Tensor:
    """query [S * columns, heads, d] contiguous -> like query; rows that are padding are zeros."""
    rows, heads, width = query.shape
    kv_heads, splits = keys.shape[1], card.max_splits
    group = heads // kv_heads
    tile = _tile(group, card.columns)
    block_d = max(16, triton.next_power_of_2(width))
    sequences = card.starts.shape[0]
    scalars = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=query.device)
    parts = torch.empty(rows, heads, splits, width, dtype=torch.float32, device=query.device)
    tiles = triton.cdiv(card.columns, tile // group)
    _split_kernel[(splits, kv_heads * tiles, sequences)](
        query,
        pages(keys),
        pages(values),
        scalars[0],
        scalars[1],
        parts,
        card.block_tables,
        card.starts,
        card.counts,
        card.columns,
        card.block_tables.stride(0),
        splits,
        card.window,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=width,
        BLOCK_D=block_d,
        TILE=tile,
        PAGE=ROWS,
        SPLIT=SPLIT_ROWS,
        PRECISION=precision(query),
        num_warps=4,
        num_stages=2,  # not 1: triton 3.6 then computes the second product wrongly
        **PDL,
    )
    return combine(scalars, parts, card, query.dtype, SPLIT_ROWS, gate)


def combine(
    scalars: Tensor,
    parts: Tensor,
    card: CardAttention,
    dtype: torch.dtype,
    split: int,
    gate: Tensor | None = None,
) -> Tensor:
    """Add splits of `split` keys: scalars [2, rows, heads, splits] (maxima, sums) and parts [rows, heads, splits, d], float32,
    -> [rows, heads, d]; rows that are padding are zeros."""
    rows, heads, splits, width = parts.shape
    out = torch.empty(rows, heads, width, dtype=dtype, device=parts.device)
    _combine_kernel[(rows, heads)](
        scalars[0],
        scalars[1],
        parts,
        out if gate is None else gate,
        out,
        card.starts,
        card.counts,
        card.columns,
        splits,
        card.window,
        GATE_ROW=0 if gate is None else gate.stride(0),
        HEADS=heads,
        D=width,
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        SPLIT=split,
        BLOCK=_BLOCK,
        GATED=gate is not None,
        num_warps=1,
        **PDL,
    )
    return out


def _tile(group: int, columns: int) -> int:
    """The least tile that holds all columns, or `_WIDE`, or what one column needs. Raises ValueError when none does."""
    if group > _TILES[-1]:
        raise ValueError(f"{group} query heads a KV head, a tile holds {_TILES[-1]}")
    return next(tile for tile in _TILES if group * columns <= tile or group <= tile >= _WIDE)
