"""Pending and new rows over the states on a card: a program holds a part of a state in registers and reads it once.

A new row finds its correction d = beta (v - decay k S) and leaves it in the ring where v was; its output is
decay q S + (q k) d, so that both sums are over the state before the row, which itself is advanced only when another row
follows. When the row is pending, the state takes the same two steps with the d that is known, S <- decay S and
S <- S + k d: the bits of the row's first run for half its work, and no sum over the key. A plain decode step is the
verify of one column.

States, pending rows and the plan are read before the wait: in the launches that may overlap nobody writes them. New rows
are read past the L1, which may hold what lay there before. Pending rows lie where no cache has them, so four of them are
on their way to shared memory together with the state, or each would be a wait on memory with nothing else under way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gated_delta.plan import CardReplay, DeltaShape
from kernels.launch import PDL
from kernels.tiles import STATE_COLUMNS, STATE_GROUPS

_REGISTERS = 224
"""A thread: nine programs share a multiprocessor, and nothing spills."""


@triton.jit
def _over_key(x):
    """[groups, keys of one, ...] -> [...]: a group's keys lie in one lane and are added first."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _pending_row(row, key_at, value_at, decay_at, in_k, in_v):
    """(key, correction, decay) of a row that has run."""
    key = tl.load(row + key_at, mask=in_k, other=0.0)
    return key, tl.load(row + value_at, mask=in_v, other=0.0), tl.load(row + decay_at)


@triton.jit
def _new_row(row, query_at, key_at, value_at, beta_at, decay_at, in_k, in_v, there):
    """(query, key, value, beta, decay) of a row that has not; zeros, and nothing is read, where it is not `there`."""
    query = tl.load(row + query_at, mask=in_k & there, other=0.0, cache_modifier=".cg")
    key = tl.load(row + key_at, mask=in_k & there, other=0.0, cache_modifier=".cg")
    value = tl.load(row + value_at, mask=in_v & there, other=0.0, cache_modifier=".cg")
    beta = tl.load(row + beta_at, mask=there, other=0.0, cache_modifier=".cg")
    return query, key, value, beta, tl.load(row + decay_at, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _replayed(
    current, ring, first, folds, key_at, value_at, decay_at, in_k, in_v, RING: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """The state after the pending rows, which are copied ahead."""
    for i in tl.range(folds, num_stages=5):
        row = ring + (first + i) % RING * PACKED
        key, delta, decay = _pending_row(row, key_at, value_at, decay_at, in_k, in_v)
        current = tl.fma(key[:, :, None], delta[None, None, :], current * decay)
    return current


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
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (columns of the state, value head, sequence): S [GROUPS, EACH, TILE] in registers, read once; its key g *
    EACH + i is at (g, i)."""
    if OVERLAP:
        gdc_launch_dependents()
    WHOLE: tl.constexpr = DK == GROUPS * EACH and DV % TILE == 0
    tile, h, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channels: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    packed: tl.constexpr = channels + 2 * VALUE_HEADS
    slot = tl.load(slots + sequence).to(tl.int64)
    folds = tl.load(pending + sequence)
    first = tl.load(head + sequence)
    count = tl.minimum(tl.load(counts + sequence), columns)
    stores = (tl.load(store_after + sequence) != 0) | (columns == 0)
    k = (tl.arange(0, GROUPS) * EACH)[:, None] + tl.arange(0, EACH)[None, :]
    v = tile * TILE + tl.arange(0, TILE)
    in_k, in_v = (k < DK) | WHOLE, (v < DV) | WHOLE
    key_head = h // (VALUE_HEADS // KEY_HEADS) * DK
    query_at = key_head + k
    key_at = KEY_HEADS * DK + query_at
    value_at = 2 * KEY_HEADS * DK + h * DV + v
    beta_at, decay_at = channels + h, channels + VALUE_HEADS + h
    ring = store + slot * RING * packed
    cells = state + (slot * VALUE_HEADS + h) * DK * DV + k[:, :, None] * DV + v[None, None, :]
    inside = in_k[:, :, None] & in_v[None, None, :]
    current = tl.load(cells, mask=inside, other=0.0)
    if folds > 0:
        current = _replayed(
            current, ring, first, folds, key_at, value_at, decay_at, in_k, in_v, RING, packed
        )  # fmt: skip
        if stores:
            tl.store(cells, current, mask=inside)

    if OVERLAP:
        gdc_wait()
    first += folds
    row = ring + first % RING * packed
    query, key, value, beta, decay = _new_row(
        row, query_at, key_at, value_at, beta_at, decay_at, in_k, in_v, count > 0
    )
    for t in range(count):
        here, row = row, ring + (first + t + 1) % RING * packed
        more = t + 1 < count
        ahead = _new_row(row, query_at, key_at, value_at, beta_at, decay_at, in_k, in_v, more)
        known = _over_key(current * key[:, :, None])
        seen = _over_key(current * query[:, :, None])
        delta = beta * (value - decay * known)
        tl.store(here + value_at, delta, mask=in_v)
        at = (sequence.to(tl.int64) * columns + t) * VALUE_HEADS + h
        tl.store(out + at * DV + v, decay * seen + _over_key(query * key) * delta, mask=in_v)
        if more:
            current = tl.fma(key[:, :, None], delta[None, None, :], current * decay)
        query, key, value, beta, decay = ahead
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
        GROUPS=STATE_GROUPS,
        EACH=max(1, triton.next_power_of_2(shape.key_dim) // STATE_GROUPS),
        TILE=tile,
        num_warps=1,
        maxnreg=_REGISTERS,
        **PDL,
    )
