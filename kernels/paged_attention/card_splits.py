"""Decode and verify attention on a card: absolute splits of 256 keys side by side, then their ordered sum.

A program takes a tile of 64 (column, head of the group) rows of one KV head over one split, page by page with a running
maximum, and leaves (m, l, acc) in float32. The second launch adds the splits of a row in ascending order. Split bounds
are positions, so a row's bits do not know how long its neighbours are, nor how many columns run with it: a page that a row
does not see scales its sums by exactly 1 and adds exactly 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import PDL
from kernels.paged_attention.card_pages import LOG2E, pages, precision
from kernels.paged_attention.plan import CardAttention
from kernels.tiles import ROWS, SPLIT_ROWS

_TILE = 64
"""Rows of a query tile: columns x heads of the group, as many whole columns as fit."""


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
        gdc_wait()
    group: tl.constexpr = HEADS // KV_HEADS
    width: tl.constexpr = TILE // group
    split, sequence = tl.program_id(0), tl.program_id(2)
    kv_head, first = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS * width
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    last_key = start + tl.minimum(first + width, count) - 1
    first_key = tl.where(window > 0, tl.maximum(start + first - window + 1, 0), 0)
    base = split * SPLIT
    if (first >= count) | (base > last_key) | (base + SPLIT <= first_key):
        return
    r = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    p = tl.arange(0, PAGE)
    in_d = d < D
    column = first + r // group
    real = (r < width * group) & (column < count)
    row = (sequence.to(tl.int64) * columns + column) * HEADS + kv_head * group + r % group
    q = tl.load(query + row[:, None] * D + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0)
    position = (start + column)[:, None]
    lowest = tl.where(window > 0, position - window, -1)
    peak = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    from_page = tl.maximum(first_key - base, 0) // PAGE
    to_page = (tl.minimum(last_key - base, SPLIT - 1)) // PAGE + 1
    for page in range(from_page, to_page):
        key = base + page * PAGE + p
        block = tl.load(tables + sequence * table_row + base // PAGE + page)
        at = (block * KV_HEADS + kv_head) * PAGE
        k = keys.load([at, 0])
        seen = (key[None, :] <= position) & (key[None, :] > lowest)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2((scores - finite[:, None]) * LOG2E)
        shrink = tl.exp2((peak - finite) * LOG2E)
        total = total * shrink + tl.sum(weights, axis=1)
        v = values.load([at, 0])
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = higher
    at = row * splits + split
    tl.store(peaks + at, peak, mask=real)
    tl.store(sums + at, total, mask=real)
    tl.store(parts + at[:, None] * D + d[None, :], acc, mask=real[:, None] & in_d[None, :])


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
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row, head): the row's splits in ascending order, then the gate."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, head = tl.program_id(0), tl.program_id(1)
    sequence, t = row // columns, row % columns
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    here = row.to(tl.int64) * HEADS + head
    if t >= tl.load(counts + sequence):
        tl.store(out + here * D + d, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=inside)
        return
    position = tl.load(starts + sequence) + t
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0) // SPLIT
    at = here * splits + first
    peak, total = tl.load(peaks + at), tl.load(sums + at)
    acc = tl.load(parts + at * D + d, mask=inside, other=0.0)
    for split in range(first + 1, position // SPLIT + 1):
        at = here * splits + split
        own = tl.load(peaks + at)
        higher = tl.maximum(peak, own)
        shrink, grow = tl.exp2((peak - higher) * LOG2E), tl.exp2((own - higher) * LOG2E)
        total = total * shrink + tl.load(sums + at) * grow
        acc = acc * shrink + tl.load(parts + at * D + d, mask=inside, other=0.0) * grow
        peak = higher
    result = acc / total
    if GATED:
        x = tl.load(gate + row.to(tl.int64) * GATE_ROW + head * D + d, mask=inside, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-x))
    tl.store(out + here * D + d, result.to(out.dtype.element_ty), mask=inside)


def attend(query: Tensor, keys: Tensor, values: Tensor, card: CardAttention, gate: Tensor | None) -> Tensor:
    """query [S * columns, heads, d] contiguous -> like query; rows that are padding are zeros."""
    rows, heads, width = query.shape
    kv_heads, splits = keys.shape[1], card.max_splits
    group = heads // kv_heads
    if group > _TILE:
        raise ValueError(f"{group} query heads a KV head, a tile holds {_TILE}")
    block_d = max(16, triton.next_power_of_2(width))
    sequences = card.starts.shape[0]
    scalars = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=query.device)
    parts = torch.empty(rows, heads, splits, width, dtype=torch.float32, device=query.device)
    tiles = triton.cdiv(card.columns, _TILE // group)
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
        TILE=_TILE,
        PAGE=ROWS,
        SPLIT=SPLIT_ROWS,
        PRECISION=precision(query),
        num_warps=8,
        num_stages=2,
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
        GATED=gate is not None,
        num_warps=1,
        **PDL,
    )
    return out
