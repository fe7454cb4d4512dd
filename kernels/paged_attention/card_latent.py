"""Attention to latent rows on a card, where a row [c | r] is the key of all heads and its part c their value.

A program takes a tile of (column, head) pairs as they lie and walks the pages of one split: a page is read once, in two
pieces, as key and as value. Decode and verify run in absolute splits of 256 keys, a prefill in a single one; both end in the
ordered sum over splits of `card_splits`. A page that a row does not see scales its sums by exactly 1 and adds exactly 0, so
that neither tiles nor cuts reach a row's bits. Widths are padded to powers of two apart from each other: 512 + 64 stays so.
Of sparse attention a row sees the keys that `card_chosen` marked.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import PDL
from kernels.paged_attention.card_pages import LOG2E, precision
from kernels.paged_attention.card_splits import combine
from kernels.paged_attention.plan import CardAttention
from kernels.tiles import ROWS, SPLIT_ROWS


class _Tile(NamedTuple):
    """How a program works: a function of phase, heads, width and type, never of rows."""

    rows: int
    keys: int
    """Of a page that are read together."""
    warps: int
    stages: int


_WIDE: Final = _Tile(64, ROWS, 8, 2)
_NARROW: Final = _Tile(16, ROWS, 4, 2)
"""Of decode and verify with few heads: 22 us instead of 31 for a row of 20 heads over 4096 keys on an H200, 119 instead of
129 for 16 x 4 rows; with 128 heads 154 instead of 128."""
_MANY_HEADS: Final = 64
_LONG: Final = _Tile(16, 16, 4, 1)
"""Of rows longer than bfloat16 ones of 512: a page and its queries would not fit the shared memory."""
_FLOAT32: Final = _Tile(32, ROWS, 4, 1)
"""Of shorter ones in float32."""
_SHORT_BYTES: Final = 1024
_LONGEST_BYTES: Final = 4096
"""Of the padded part that is key and value."""

_UNSPLIT: Final = 1 << 30
"""Keys of a prefill's only split."""


@triton.jit(do_not_specialize=["columns", "table_row", "splits", "most_keys"])
def _latent_kernel(
    query,
    latents,
    shared,
    peaks,
    sums,
    parts,
    tables,
    starts,
    counts,
    seen,
    columns,
    table_row,
    splits,
    most_keys,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPARSE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (split, tile, sequence)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    split, sequence = tl.program_id(0), tl.program_id(2)
    first = tl.program_id(1) * TILE
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    base = split * SPLIT
    last_key = start + tl.minimum((first + TILE - 1) // HEADS + 1, count) - 1
    if (first // HEADS >= count) | (base > last_key):
        return
    r = first + tl.arange(0, TILE)
    column = r // HEADS
    real = column < count
    c, e, p = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R), tl.arange(0, KEYS)
    row = sequence.to(tl.int64) * columns * HEADS + r
    source = query + row[:, None] * (RANK + ROPE)
    q = tl.load(source + c[None, :], mask=real[:, None] & (c < RANK)[None, :], other=0.0)
    turned = tl.load(source + RANK + e[None, :], mask=real[:, None] & (e < ROPE)[None, :], other=0.0)
    position = (start + column)[:, None]
    peak = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_C], tl.float32)
    marks = seen + (sequence.to(tl.int64) * columns + column)[:, None] * most_keys
    for first_key in range(base, tl.minimum(last_key, base + SPLIT - 1) + 1, KEYS):
        at = tl.load(tables + sequence * table_row + first_key // PAGE) * PAGE + first_key % PAGE
        k = latents.load([at, 0])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(turned, tl.trans(shared.load([at, 0])), scores, input_precision=PRECISION)
        sees = (first_key + p)[None, :] <= position
        if SPARSE:
            mark = tl.load(marks + (first_key + p)[None, :], mask=real[:, None] & sees, other=0)
            sees = sees & (mark != 0)
        scores = tl.where(sees, scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2((scores - finite[:, None]) * LOG2E)
        shrink = tl.exp2((peak - finite) * LOG2E)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(k.dtype), k, acc * shrink[:, None], input_precision=PRECISION)
        peak = higher
    at = row * splits + split
    tl.store(peaks + at, peak, mask=real)
    tl.store(sums + at, total, mask=real)
    tl.store(parts + at[:, None] * RANK + c[None, :], acc, mask=real[:, None] & (c < RANK)[None, :])


def attend(query: Tensor, plane: Tensor, card: CardAttention, rank: int) -> Tensor:
    """query [S * columns, heads, rank + rope] contiguous, plane [blocks, 1, 64, rank + rope, more with an index] ->
    [S * columns, heads, rank]; rows that are padding are zeros."""
    rows, heads, width = query.shape
    if card.window:
        raise ValueError("latent rows have no window")
    check(rank, width - rank, plane.shape[3], query.dtype)
    splits = 1 if card.prefill else card.max_splits
    split = _UNSPLIT if card.prefill else SPLIT_ROWS
    tile = _tile(query.dtype, heads, rank, prefill=card.prefill)
    scalars = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=query.device)
    parts = torch.empty(rows, heads, splits, rank, dtype=torch.float32, device=query.device)
    _latent_kernel[(splits, triton.cdiv(card.columns * heads, tile.rows), card.starts.shape[0])](
        query,
        _piece(plane, 0, rank, tile.keys),
        _piece(plane, rank, width, tile.keys),
        scalars[0],
        scalars[1],
        parts,
        card.block_tables,
        card.starts,
        card.counts,
        card.counts if card.seen is None else card.seen,
        card.columns,
        card.block_tables.stride(0),
        splits,
        0 if card.seen is None else card.seen.shape[1],
        HEADS=heads,
        RANK=rank,
        ROPE=width - rank,
        BLOCK_C=_padded(rank),
        BLOCK_R=_padded(width - rank),
        TILE=tile.rows,
        PAGE=ROWS,
        KEYS=tile.keys,
        SPLIT=split,
        SPARSE=card.seen is not None,
        PRECISION=precision(query),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **PDL,
    )
    return combine(scalars, parts, card, query.dtype, split)


def check(rank: int, rope: int, row: int, dtype: torch.dtype) -> None:
    """ValueError for rows, `row` elements wide in all, that `attend` cannot read, so that no request has to find out."""
    if row * dtype.itemsize % 16 or rank * dtype.itemsize % 16:
        raise ValueError(f"elements {rank} to {rank + rope} of a row of {row} do not begin on 16 bytes")
    if _padded(rank) * dtype.itemsize > _LONGEST_BYTES:
        raise ValueError(
            f"latents of {rank} elements: the longest that fit a card's shared memory are "
            f"{_LONGEST_BYTES // dtype.itemsize} of {dtype}"
        )


def _tile(dtype: torch.dtype, heads: int, rank: int, *, prefill: bool) -> _Tile:
    if _padded(rank) * dtype.itemsize > _SHORT_BYTES:
        return _LONG
    if dtype == torch.float32:
        return _FLOAT32
    return _WIDE if prefill or heads > _MANY_HEADS else _NARROW


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _piece(plane: Tensor, first: int, stop: int, keys: int) -> TensorDescriptor:
    """Columns first..stop-1 of the rows of a plane, read `keys` at a time."""
    width = plane.shape[3]
    rows = plane.view(-1, width)[:, first:stop]
    return TensorDescriptor(rows, list(rows.shape), [width, 1], [keys, _padded(stop - first)])
