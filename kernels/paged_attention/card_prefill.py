"""Prefill attention on a card: tiles of query rows of one head, keys page by page from the first, nothing split.

Every row adds its pages in ascending order from an absolute bound, whatever tile or chunk it runs in, so any cut on the
grid gives the same bits. Full pages and masked ones go through the same arithmetic ((s - m) c, which cannot contract).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_attention.card_pages import LOG2E, pages, precision
from kernels.paged_attention.plan import CardAttention
from kernels.tiles import ROWS

_TILE = 128


@triton.jit
def _pages(
    q,
    peak,
    total,
    acc,
    keys,
    values,
    table,
    from_page,
    to_page,
    position,
    lowest,
    kv_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add pages in ascending order; without a mask every row sees all of them."""
    for page in range(from_page, to_page):
        at = (tl.load(table + page) * KV_HEADS + kv_head) * PAGE
        k = keys.load([at, 0])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            key = (page * PAGE + tl.arange(0, PAGE))[None, :]
            scores = tl.where((key <= position) & (key > lowest), scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2((scores - finite[:, None]) * LOG2E)
        shrink = tl.exp2((peak - finite) * LOG2E)
        total = total * shrink + tl.sum(weights, axis=1)
        v = values.load([at, 0])
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = higher
    return peak, total, acc


@triton.jit(do_not_specialize=["columns", "table_row", "window"])
def _prefill_kernel(
    query,
    keys,
    values,
    gate,
    out,
    tables,
    starts,
    counts,
    columns,
    table_row,
    window,
    GATE_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (query tile from the last on, head, sequence)."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE
    kv_head = head // (HEADS // KV_HEADS)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    t = first + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    real = t < count
    row = sequence.to(tl.int64) * columns + t
    at_row = (row * HEADS + head)[:, None] * D + d[None, :]
    held = (t < columns)[:, None] & in_d[None, :]
    if first >= count:
        tl.store(out + at_row, tl.zeros([TILE, BLOCK_D], out.dtype.element_ty), mask=held)
        return
    q = tl.load(query + at_row, mask=real[:, None] & in_d[None, :], other=0.0)
    position = (start + t)[:, None]
    lowest = tl.where(window > 0, position - window, -1)
    last_key = start + tl.minimum(first + TILE, count) - 1
    first_key = tl.where(window > 0, tl.maximum(start + first - window + 1, 0), 0)
    peak = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    table = tables + sequence * table_row
    from_page = first_key // PAGE
    whole = tl.where(window > 0, from_page, (start + first + 1) // PAGE)
    peak, total, acc = _pages(
        q,
        peak,
        total,
        acc,
        keys,
        values,
        table,
        from_page,
        whole,
        position,
        lowest,
        kv_head,
        KV_HEADS,
        PAGE,
        False,
        PRECISION,
    )
    peak, total, acc = _pages(
        q,
        peak,
        total,
        acc,
        keys,
        values,
        table,
        whole,
        last_key // PAGE + 1,
        position,
        lowest,
        kv_head,
        KV_HEADS,
        PAGE,
        True,
        PRECISION,
    )
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if GATED:
        at_gate = row[:, None] * GATE_ROW + head * D + d[None, :]
        x = tl.load(gate + at_gate, mask=real[:, None] & in_d[None, :], other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-x))
    result = tl.where(real[:, None], result, 0.0)
    tl.store(out + at_row, result.to(out.dtype.element_ty), mask=held)


def attend(query: Tensor, keys: Tensor, values: Tensor, card: CardAttention, gate: Tensor | None) -> Tensor:
    """query [S * columns, heads, d] contiguous -> like query; rows that are padding are zeros."""
    _, heads, width = query.shape
    out = torch.empty_like(query)
    tile = _TILE if query.dtype == torch.bfloat16 else ROWS
    _prefill_kernel[(triton.cdiv(card.columns, tile), heads, card.starts.shape[0])](
        query,
        pages(keys),
        pages(values),
        query if gate is None else gate,
        out,
        card.block_tables,
        card.starts,
        card.counts,
        card.columns,
        card.block_tables.stride(0),
        card.window,
        GATE_ROW=0 if gate is None else gate.stride(0),
        HEADS=heads,
        KV_HEADS=keys.shape[1],
        D=width,
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        TILE=tile,
        PAGE=ROWS,
        GATED=gate is not None,
        PRECISION=precision(query),
        num_warps=8,
        num_stages=2,
    )
    return out
