"""Pending and new rows over the states on a card: a program holds a part of a state in registers and reads it once.

Its loop is the same for pending and for new rows, hence a row has the same bits as either, and a plain decode step is the
verify of one column. Rows come from the ring as `card_mix` packed them, one ahead of the one that is run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gated_delta.plan import CardReplay, DeltaShape
from kernels.launch import PDL
from kernels.tiles import STATE_COLUMNS


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
        if i >= folds:
            o = tl.sum(current * query[:, None], axis=0)
            at = (sequence.to(tl.int64) * columns + i - folds) * VALUE_HEADS + h
            tl.store(out + at * DV + v, o, mask=in_v)
        if (i + 1 == folds) & stores:
            tl.store(cells, current, mask=inside)

        query, key, value, beta, decay = next_query, next_key, next_value, next_beta, next_decay
    for t in range(count, columns):
        at = (sequence.to(tl.int64) * columns + t) * VALUE_HEADS + h
        tl.store(out + at * DV + v, tl.zeros([TILE], tl.float32), mask=in_v)


def replay(state: Tensor, store: Tensor, out: Tensor, card: CardReplay, shape: DeltaShape) -> None:
    """Pending and new rows over the states; with no columns only the pending ones, and every state is stored."""
    tile = min(STATE_COLUMNS, triton.next_power_of_2(shape.value_dim))
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
        num_warps=1,
        **PDL,
    )
