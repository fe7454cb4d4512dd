"""Sparse attention's choice of keys on a card: the scores of `chosen`, then for each row the marks of the keys that it sees.

A score is a product of fixed tiles, its heads added in order; a row is scored and marked alone. The `most`-th largest score
is found by counting, eight bits a pass, in the order of the numbers as integers, so the choice is exact whatever the lengths:
as many of the equal ones as are missing are taken from the smallest key on. No launch waits for the host, and lengths pick no binary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import PDL
from kernels.paged_attention.card_pages import precision
from kernels.paged_attention.plan import AttentionPlan, CardAttention
from kernels.tiles import ROWS

_TILE: Final = 16
"""Columns of a program that scores."""
_STEP: Final = 2048
"""Keys that a program that marks looks at together."""
_SLAB: Final = 512
"""Columns whose scores lie in memory at once: a prompt chunk over many keys would need more than its marks."""


@triton.jit(do_not_specialize=["columns", "first", "slab", "table_row", "most_keys"])
def _scores_kernel(
    query,
    weights,
    keys,
    scores,
    tables,
    starts,
    counts,
    columns,
    first,
    slab,
    table_row,
    most_keys,
    KEY_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (page, tile, sequence): scores of the columns from `first` on; keys behind a row are left alone."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    page, sequence = tl.program_id(0), tl.program_id(2)
    within = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = first + within
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    last = start + tl.minimum(first + (tl.program_id(1) + 1) * TILE, count) - 1
    if (first + tl.program_id(1) * TILE >= count) | (page * PAGE > last):
        return
    real = (column < count) & (within < slab)
    d, p = tl.arange(0, BLOCK_D), tl.arange(0, PAGE)
    block = tl.load(tables + sequence * table_row + page).to(tl.int64)
    key = block * PAGE * KEY_ROW + p[:, None] * KEY_ROW + d[None, :]
    k = tl.load(keys + key, mask=(d < D)[None, :], other=0.0)
    row = sequence.to(tl.int64) * columns + column
    total = tl.zeros([TILE, PAGE], tl.float32)
    for head in range(HEADS):
        source = query + (row * HEADS + head)[:, None] * D + d[None, :]
        q = tl.load(source, mask=real[:, None] & (d < D)[None, :], other=0.0)
        each = tl.maximum(tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0)
        share = tl.load(weights + row * HEADS + head, mask=real, other=0.0).to(tl.float32)
        total += each * share[:, None]
    to = (sequence.to(tl.int64) * slab + within)[:, None] * most_keys + (page * PAGE + p)[None, :]
    tl.store(scores + to, total, mask=real[:, None])


@triton.jit
def _ordered(score):
    """float32 as uint32 of the same order; -0 is 0."""
    bits = (score + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit(do_not_specialize=["columns", "first", "slab", "most_keys", "most"])
def _marks_kernel(
    scores,
    seen,
    starts,
    counts,
    columns,
    first,
    slab,
    most_keys,
    most,
    STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (column of the slab, sequence): 1 for every key that the row sees. Keys behind a row are left alone."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    within, sequence = tl.program_id(0), tl.program_id(1)
    column = first + within
    if column >= tl.load(counts + sequence):
        return
    keys = tl.load(starts + sequence) + column + 1
    source = scores + (sequence.to(tl.int64) * slab + within) * most_keys
    to = seen + (sequence.to(tl.int64) * columns + column) * most_keys
    k = tl.arange(0, STEP)
    # The largest number that at least `most` of the row's scores reach, eight bits a pass; 0 if there are fewer keys.
    least = tl.zeros([], tl.uint32)
    left = most
    if keys > most:
        digits = tl.arange(0, 256)
        for level in tl.static_range(4):
            count = tl.zeros([256], tl.int32)
            for at in range(0, keys, STEP):
                found = _ordered(tl.load(source + at + k, mask=at + k < keys, other=0.0))
                open_ = at + k < keys
                if level > 0:
                    open_ = open_ & ((found ^ least) >> (32 - 8 * level) == 0)
                count += tl.histogram(((found >> (24 - 8 * level)) & 255).to(tl.int32), 256, mask=open_)
            reach = tl.sum(count) - tl.cumsum(count, 0) + count
            digit = tl.max(tl.where(reach >= left, digits, 0))
            left -= tl.sum(tl.where(digits > digit, count, 0))
            least = least | (digit.to(tl.uint32) << (24 - 8 * level))
    for at in range(0, keys, STEP):
        found = _ordered(tl.load(source + at + k, mask=at + k < keys, other=0.0))
        same = ((found == least) & (at + k < keys)).to(tl.int32)
        rank = tl.cumsum(same, 0)
        sees = (found > least) | ((same != 0) & (rank <= left))
        tl.store(to + at + k, sees.to(tl.uint8), mask=at + k < keys)
        left -= tl.sum(same)


def narrowed(query: Tensor, weights: Tensor, keys: Tensor, plan: AttentionPlan, most: int) -> AttentionPlan:
    """The plan with marks of each row's keys; see `chosen.narrowed`. query [S * columns, heads, d] and weights
    [S * columns, heads] contiguous, keys [blocks, 1, 64, d], the end of every row of a plane."""
    card = plan.card
    assert card is not None  # the dispatcher looked
    most_keys = card.block_tables.shape[1] * ROWS
    if most_keys <= most:
        return plan
    seen = torch.empty(query.shape[0], most_keys, dtype=torch.uint8, device=query.device)
    slab = min(_SLAB, card.columns)
    scores = torch.empty(card.starts.shape[0] * slab, most_keys, dtype=torch.float32, device=query.device)
    for first in range(0, card.columns, slab):
        _launch(query, weights, keys, card, scores, seen, first, slab, most)
    return replace(plan, card=replace(card, seen=seen))


def _launch(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    card: CardAttention,
    scores: Tensor,
    seen: Tensor,
    first: int,
    slab: int,
    most: int,
) -> None:
    """The marks of columns first .. first + slab - 1."""
    sequences, most_keys = card.starts.shape[0], seen.shape[1]
    width = query.shape[2]
    _scores_kernel[(card.block_tables.shape[1], triton.cdiv(slab, _TILE), sequences)](
        query,
        weights,
        keys,
        scores,
        card.block_tables,
        card.starts,
        card.counts,
        card.columns,
        first,
        slab,
        card.block_tables.stride(0),
        most_keys,
        KEY_ROW=keys.stride(2),
        HEADS=query.shape[1],
        D=width,
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        TILE=_TILE,
        PAGE=ROWS,
        PRECISION=precision(query),
        num_warps=4,
        **PDL,
    )
    _marks_kernel[(min(slab, card.columns - first), sequences)](
        scores,
        seen,
        card.starts,
        card.counts,
        card.columns,
        first,
        slab,
        most_keys,
        most,
        STEP=_STEP,
        num_warps=8,
        **PDL,
    )
