"""Decode and verify on a card: one launch that convolves, gates and packs new rows, one that replays rows over the states.

A packed row of the card's store holds q and k normalised already (q scaled too) and exp(g) for g, so that a row that is
replayed several times is prepared once. All of it is float32. A program's loop is the same for pending and for new rows,
hence a row has the same bits as either, and a plain decode step is the verify of one column.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gated_delta.plan import CardReplay, DeltaShape, MixWeights
from kernels.launch import OVERLAP

_VALUE_TILE = 16
"""State columns of a program: 64-byte segments of a row, 64 registers a thread for the state of a 128-wide key."""

_EPS = 1e-6


@triton.jit
def silu(x):
    """x * sigmoid(x), as one division."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """max(x, 0) + log1p(exp(-|x|)); the quotient corrects what 1 + e rounded away."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit(do_not_specialize=["columns"])
def _mix_kernel(
    y,
    conv,
    rate,
    dt_bias,
    store,
    windows,
    slots,
    pending,
    head,
    counts,
    columns,
    scale,
    EPS: tl.constexpr,
    Y_ROW: tl.constexpr,
    RING: tl.constexpr,
    TAPS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    GATES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row, block): a block is one head of q, k or v, or, the last one, all gates."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, block = tl.program_id(0), tl.program_id(1)
    sequence, t = row // columns, row % columns
    if t >= tl.load(counts + sequence):
        return
    channels: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    packed: tl.constexpr = channels + 2 * VALUE_HEADS
    slot = tl.load(slots + sequence).to(tl.int64)
    first = tl.load(head + sequence) + tl.load(pending + sequence)
    own = slot * RING + (first + t) % RING
    source = y + row.to(tl.int64) * Y_ROW
    if block == 2 * KEY_HEADS + VALUE_HEADS:
        h = tl.arange(0, GATES)
        inside = h < VALUE_HEADS
        b = tl.load(source + channels + h, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(source + channels + VALUE_HEADS + h, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias + h, mask=inside, other=0.0)
        g = -softplus(a + bias) * tl.load(rate + h, mask=inside, other=0.0)
        tl.store(store + own * packed + channels + h, 1.0 / (1.0 + tl.exp(-b)), mask=inside)
        tl.store(store + own * packed + channels + VALUE_HEADS + h, tl.exp(g), mask=inside)
        return
    is_key = block < 2 * KEY_HEADS
    start = tl.where(is_key, block * DK, 2 * KEY_HEADS * DK + (block - 2 * KEY_HEADS) * DV)
    d = tl.arange(0, BLOCK)
    inside = d < tl.where(is_key, DK, DV)
    channel = start + d
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TAPS):
        back = t + j - (TAPS - 1)
        kept = slot * RING + (first + back + RING) % RING
        old = tl.load(windows + kept * channels + channel, mask=inside & (back < 0), other=0.0)
        new = tl.load(source + (back - t) * Y_ROW + channel, mask=inside & (back >= 0), other=0.0)
        x = tl.where(back < 0, old, new)
        total += x.to(tl.float32) * tl.load(conv + j * channels + channel, mask=inside, other=0.0)
        if j == TAPS - 1:
            tl.store(windows + own * channels + channel, x, mask=inside)
    u = silu(total)
    factor = tl.rsqrt(tl.sum(tl.where(inside, u * u, 0.0)) + EPS) * tl.where(block < KEY_HEADS, scale, 1.0)
    tl.store(store + own * packed + channel, u * tl.where(is_key, factor, 1.0), mask=inside)


@triton.jit(do_not_specialize=["columns"])
def _step_kernel(
    state,
    store,
    out,
    slots,
    pending,
    head,
    store_after,
    counts,
    columns,
    RING: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (columns of the state, value head, sequence): S [dk, TILE] in registers, read once."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    tile, h, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channels: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    packed: tl.constexpr = channels + 2 * VALUE_HEADS
    slot = tl.load(slots + sequence).to(tl.int64)
    folds = tl.load(pending + sequence)
    first = tl.load(head + sequence)
    count = tl.minimum(tl.load(counts + sequence), columns)
    stores = (tl.load(store_after + sequence) != 0) | (columns == 0)
    k = tl.arange(0, BLOCK_K)
    v = tile * TILE + tl.arange(0, TILE)
    in_k, in_v = k < DK, v < DV
    query_at = h // (VALUE_HEADS // KEY_HEADS) * DK + k
    value_at = 2 * KEY_HEADS * DK + h * DV + v
    cells = state + (slot * VALUE_HEADS + h) * DK * DV + k[:, None] * DV + v[None, :]
    inside = in_k[:, None] & in_v[None, :]
    current = tl.load(cells, mask=inside, other=0.0)

    row = store + (slot * RING + first % RING) * packed
    query = tl.load(row + query_at, mask=in_k, other=0.0)
    key = tl.load(row + KEY_HEADS * DK + query_at, mask=in_k, other=0.0)
    value = tl.load(row + value_at, mask=in_v, other=0.0)
    beta = tl.load(row + channels + h)
    decay = tl.load(row + channels + VALUE_HEADS + h)
    for i in range(folds + count):
        row = store + (slot * RING + (first + i + 1) % RING) * packed
        next_query = tl.load(row + query_at, mask=in_k, other=0.0)
        next_key = tl.load(row + KEY_HEADS * DK + query_at, mask=in_k, other=0.0)
        next_value = tl.load(row + value_at, mask=in_v, other=0.0)
        next_beta = tl.load(row + channels + h)
        next_decay = tl.load(row + channels + VALUE_HEADS + h)

        current *= decay
        delta = beta * (value - tl.sum(current * key[:, None], axis=0))
        current += key[:, None] * delta[None, :]
        o = tl.sum(current * query[:, None], axis=0)
        if i >= folds:
            at = (sequence.to(tl.int64) * columns + i - folds) * VALUE_HEADS + h
            tl.store(out + at * DV + v, o, mask=in_v)
        if (i + 1 == folds) & stores:
            tl.store(cells, current, mask=inside)

        query, key, value, beta, decay = next_query, next_key, next_value, next_beta, next_decay
    for t in range(count, columns):
        at = (sequence.to(tl.int64) * columns + t) * VALUE_HEADS + h
        tl.store(out + at * DV + v, tl.zeros([TILE], tl.float32), mask=in_v)


def decode_rows(
    y: Tensor,
    weights: MixWeights,
    state: Tensor,
    store: Tensor,
    windows: Tensor,
    card: CardReplay,
    shape: DeltaShape,
) -> Tensor:
    """y [S * T, ...] contiguous -> o float32 [S * T, value_heads, dv]; see the twin's `decode`."""
    rows = y.shape[0]
    widest = max(shape.key_dim, shape.value_dim)
    _mix_kernel[(rows, 2 * shape.key_heads + shape.value_heads + 1)](
        y,
        weights.conv,
        weights.rate,
        weights.dt_bias,
        store,
        windows,
        card.slots,
        card.pending,
        card.head,
        card.counts,
        card.columns,
        shape.key_dim**-0.5,
        EPS=_EPS,
        Y_ROW=y.shape[1],
        RING=store.shape[1],
        TAPS=weights.conv.shape[0],
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        DK=shape.key_dim,
        DV=shape.value_dim,
        BLOCK=triton.next_power_of_2(widest),
        GATES=triton.next_power_of_2(shape.value_heads),
        OVERLAP=OVERLAP,
        num_warps=1,
        **({"launch_pdl": True} if OVERLAP else {}),
    )
    out = torch.empty(rows, shape.value_heads, shape.value_dim, dtype=torch.float32, device=y.device)
    replay(state, store, out, card, shape)
    return out


def replay(state: Tensor, store: Tensor, out: Tensor, card: CardReplay, shape: DeltaShape) -> None:
    """Pending and new rows over the states; with no columns only the pending ones, and every state is stored."""
    tile = min(_VALUE_TILE, triton.next_power_of_2(shape.value_dim))
    _step_kernel[(triton.cdiv(shape.value_dim, tile), shape.value_heads, card.slots.shape[0])](
        state,
        store,
        out,
        card.slots,
        card.pending,
        card.head,
        card.store_after,
        card.counts,
        card.columns,
        RING=store.shape[1],
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        DK=shape.key_dim,
        DV=shape.value_dim,
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        TILE=tile,
        OVERLAP=OVERLAP,
        num_warps=1,
        **({"launch_pdl": True} if OVERLAP else {}),
    )
