"""Queries and keys of a projection normed and turned, keys and values written into their pages: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import PDL
from kernels.paged_attention.plan import CardAttention
from kernels.tiles import ROWS

_PREFILL_ROWS = 8
"""Rows of a program in a prefill; decode and verify take one, to have programs enough."""


@triton.jit(do_not_specialize=["rows", "columns", "table_row"])
def _write_kernel(
    y,
    scale,
    cos_sin,
    query,
    keys,
    values,
    tables,
    starts,
    counts,
    rows,
    columns,
    table_row,
    eps,
    Y_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (head, rows): queries first, then keys, then values. The norm's sum runs over the head in one piece."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    sequence, t = row // columns, row % columns
    count = tl.load(counts + sequence, mask=row < rows, other=0)
    real = t < count
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = real[:, None] & (d < D)
    source = y + row.to(tl.int64)[:, None] * Y_ROW
    position = tl.load(starts + sequence, mask=real, other=0) + t
    page = tl.zeros([ROWS], tl.int64)
    if head >= HEADS:
        block = tl.load(tables + sequence * table_row + position // PAGE, mask=real, other=0).to(tl.int64)
        page = ((block * KV_HEADS + (head - HEADS) % KV_HEADS) * PAGE + position % PAGE) * D
    if head >= HEADS + KV_HEADS:
        column = Y_ROW + (head - HEADS - 2 * KV_HEADS) * D
        x = tl.load(source + column + d, mask=inside, other=0.0)
        tl.store(values + page[:, None] + d, x, mask=inside)
        # Attention reads whole pages: behind the last row they hold zeros, whatever was there before.
        rest = tl.where(t == count - 1, PAGE - 1 - position % PAGE, 0)
        for r in range(1, tl.max(rest, axis=0) + 1):
            behind = inside & (r <= rest)[:, None]
            nothing = tl.zeros([ROWS, BLOCK_D], values.dtype.element_ty)
            tl.store(values + page[:, None] + r * D + d, nothing, mask=behind)
        return
    x = tl.load(source + head * D + d, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None] if NORMED else 1.0
    normed = x * factor * tl.load(scale + head * D + d, mask=d < D, other=0.0)
    # The partner of element i of the first half is i + HALF: it is normed again here rather than exchanged.
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    turns = inside & (d < 2 * HALF)
    other = tl.load(source + head * D + partner, mask=turns, other=0.0).to(tl.float32)
    other = other * factor * tl.load(scale + head * D + partner, mask=d < 2 * HALF, other=0.0)
    angle = cos_sin + row.to(tl.int64)[:, None] * (2 * HALF) + d % HALF
    cos = tl.load(angle, mask=turns, other=1.0)
    sin = tl.load(angle + HALF, mask=turns, other=0.0)
    turned = normed * cos + tl.where(d < HALF, -other, other) * sin
    result = tl.where(turns, turned, normed).to(query.dtype.element_ty)
    if head < HEADS:
        tl.store(query + (row.to(tl.int64) * HEADS + head)[:, None] * D + d, result, mask=inside)
    else:
        tl.store(keys + page[:, None] + d, result, mask=inside)


def write(
    y: Tensor,
    scale: Tensor,
    cos_sin: Tensor,
    keys: Tensor,
    values: Tensor,
    card: CardAttention,
    eps: float | None,
) -> Tensor:
    """y [S * columns, ...] contiguous -> query [S * columns, heads, d]; rows that are padding stay unwritten."""
    rows, kv_heads, width = y.shape[0], keys.shape[1], keys.shape[3]
    heads, half = scale.shape[0] - kv_heads, cos_sin.shape[-1]
    query = torch.empty(rows, heads, width, dtype=y.dtype, device=y.device)
    together = _PREFILL_ROWS if card.prefill else 1
    _write_kernel[(heads + 2 * kv_heads, triton.cdiv(rows, together))](
        y,
        scale,
        cos_sin,
        query,
        keys,
        values,
        card.block_tables,
        card.starts,
        card.counts,
        rows,
        card.columns,
        card.block_tables.stride(0),
        0.0 if eps is None else eps,
        Y_ROW=y.shape[1],
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=width,
        HALF=half,
        BLOCK_D=triton.next_power_of_2(width),
        PAGE=ROWS,
        ROWS=together,
        NORMED=eps is not None,
        num_warps=4 if card.prefill else 1,
        **PDL,
    )
    return query
