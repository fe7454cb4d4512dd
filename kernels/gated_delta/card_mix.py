"""New rows of decode and verify on a card: one launch that convolves, gates and packs them into the ring.

A packed row of the card's store holds q and k normalised already (q scaled too) and exp(g) for g, so that a row that is
replayed several times is prepared once. All of it is float32. The plan, the weights and the inputs of earlier launches are
read before the wait: nothing that these launches may overlap with writes them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.activation.device import sigmoid_of, silu_of, softplus_of
from kernels.gated_delta.plan import CardReplay, DeltaShape, MixWeights
from kernels.launch import PDL

_HEADS = 4
"""Heads of a program, one a warp."""

EPS = 1e-6


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
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (some heads of q, k or v, or, the last one, all gates; row)."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(1)
    sequence, t = row // columns, row % columns
    live = t < tl.load(counts + sequence)
    channels: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    packed: tl.constexpr = channels + 2 * VALUE_HEADS
    slot = tl.load(slots + sequence).to(tl.int64)
    first = tl.load(head + sequence) + tl.load(pending + sequence)
    own = slot * RING + (first + t) % RING
    source = y + row.to(tl.int64) * Y_ROW
    if tl.program_id(0) * HEADS >= 2 * KEY_HEADS + VALUE_HEADS:
        h = tl.arange(0, GATES)
        gated = (h < VALUE_HEADS) & live
        bias = tl.load(dt_bias + h, mask=gated, other=0.0)
        fall = tl.load(rate + h, mask=gated, other=0.0)
        if OVERLAP:
            gdc_wait()
        b = tl.load(source + channels + h, mask=gated, other=0.0).to(tl.float32)
        a = tl.load(source + channels + VALUE_HEADS + h, mask=gated, other=0.0).to(tl.float32)
        tl.store(store + own * packed + channels + h, sigmoid_of(b), mask=gated)
        decay = tl.exp(-softplus_of(a + bias) * fall)
        tl.store(store + own * packed + channels + VALUE_HEADS + h, decay, mask=gated)
    else:
        block = (tl.program_id(0) * HEADS + tl.arange(0, HEADS))[:, None]
        is_key = block < 2 * KEY_HEADS
        start = tl.where(is_key, block * DK, 2 * KEY_HEADS * DK + (block - 2 * KEY_HEADS) * DV)
        d = tl.arange(0, BLOCK)[None, :]
        inside = (d < tl.where(is_key, DK, DV)) & (block < 2 * KEY_HEADS + VALUE_HEADS) & live
        channel = start + d
        total = tl.zeros([HEADS, BLOCK], tl.float32)
        # Inputs of earlier launches, which come first in the sum; then those of this one. What is not there adds zero.
        for j in tl.static_range(TAPS - 1):
            back = t + j - (TAPS - 1)
            kept = slot * RING + (first + back + RING) % RING
            old = tl.load(windows + kept * channels + channel, mask=inside & (back < 0), other=0.0)
            total += old.to(tl.float32) * tl.load(conv + j * channels + channel, mask=inside, other=0.0)
        if OVERLAP:
            gdc_wait()
        for j in tl.static_range(TAPS):
            back = t + j - (TAPS - 1)
            x = tl.load(source + (back - t) * Y_ROW + channel, mask=inside & (back >= 0), other=0.0)
            total += x.to(tl.float32) * tl.load(conv + j * channels + channel, mask=inside, other=0.0)
            if j == TAPS - 1:
                tl.store(windows + own * channels + channel, x, mask=inside)
        u = silu_of(total)
        norm = tl.rsqrt(tl.sum(tl.where(inside, u * u, 0.0), axis=1) + EPS)[:, None]
        factor = tl.where(is_key, norm * tl.where(block < KEY_HEADS, scale, 1.0), 1.0)
        tl.store(store + own * packed + channel, u * factor, mask=inside)


def mix(
    y: Tensor, weights: MixWeights, store: Tensor, windows: Tensor, card: CardReplay, shape: DeltaShape
) -> None:
    """Keep the new rows y [S * T, ...] (contiguous) of every sequence: raw in `windows`, packed in `store`."""
    blocks = triton.cdiv(2 * shape.key_heads + shape.value_heads, _HEADS)
    _mix_kernel[(blocks + 1, y.shape[0])](
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
        EPS=EPS,
        Y_ROW=y.shape[1],
        RING=store.shape[1],
        TAPS=weights.conv.shape[0],
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        DK=shape.key_dim,
        DV=shape.value_dim,
        BLOCK=triton.next_power_of_2(max(shape.key_dim, shape.value_dim)),
        GATES=triton.next_power_of_2(shape.value_heads),
        HEADS=_HEADS,
        num_warps=_HEADS,
        **PDL,
    )
