"""Chunked prefill on a card: three launches on the 64-grid, the last one sequential over chunks.

With G the running sum of g inside a chunk, A = strictly lower beta_i (k_i . k_j) e^(G_i - G_j) and T = (I + A)^-1:

    X = beta (v - e^G (k S));   V' = T X;   o = e^G (q S) + tril(q k^T e^(G_i - G_j)) V'
    S <- e^(G_last) S + (k e^(G_last - G))^T V'

which is the twin's U - W S with T applied last, so that neither U nor W goes through memory. Products take operands in the
activations' type and add in float32; the state stays float32 in registers from chunk to chunk and in memory between
launches, so that any cut on the grid gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation.device import sigmoid_of, silu_of, softplus_of
from kernels.gated_delta.card_mix import EPS
from kernels.gated_delta.plan import DeltaShape, MixWeights
from kernels.tiles import ROWS

_PACK_ROWS = 16
_VALUE_TILE = 64
"""State columns of a program of the scan."""


@triton.jit(do_not_specialize=["rows"])
def _pack_kernel(
    y,
    conv,
    rate,
    dt_bias,
    window,
    mixed,
    gates,
    rows,
    scale,
    EPS: tl.constexpr,
    Y_ROW: tl.constexpr,
    TAPS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    GATES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (rows, head of q, k or v, or all gates); rows that are not real become zeros, which leave a state as it is."""
    block = tl.program_id(0)
    channels: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = (t < rows)[:, None]
    source = y + t.to(tl.int64)[:, None] * Y_ROW
    if block == 2 * KEY_HEADS + VALUE_HEADS:
        h = tl.arange(0, GATES)[None, :]
        inside = real & (h < VALUE_HEADS)
        b = tl.load(source + channels + h, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(source + channels + VALUE_HEADS + h, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias + h, mask=h < VALUE_HEADS, other=0.0)
        g = -softplus_of(a + bias) * tl.load(rate + h, mask=h < VALUE_HEADS, other=0.0)
        at = gates + t[:, None] * (2 * VALUE_HEADS) + h
        tl.store(at, tl.where(real, sigmoid_of(b), 0.0), mask=h < VALUE_HEADS)
        tl.store(at + VALUE_HEADS, tl.where(real, g, 0.0), mask=h < VALUE_HEADS)
        return
    is_key = block < 2 * KEY_HEADS
    start = tl.where(is_key, block * DK, 2 * KEY_HEADS * DK + (block - 2 * KEY_HEADS) * DV)
    d = tl.arange(0, BLOCK)
    within = (d < tl.where(is_key, DK, DV))[None, :]
    channel = (start + d)[None, :]
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for j in tl.static_range(TAPS):
        back = (t + j - (TAPS - 1))[:, None]
        at = source + (j - (TAPS - 1)) * Y_ROW + channel
        x = tl.load(at, mask=within & real & (back >= 0), other=0.0)
        if tl.program_id(1) == 0:
            kept = window + (back + TAPS - 1) * channels + channel
            x = tl.where(back < 0, tl.load(kept, mask=within & real & (back < 0), other=0.0), x)
        total += x.to(tl.float32) * tl.load(conv + j * channels + channel, mask=within, other=0.0)
    u = silu_of(total)
    factor = tl.rsqrt(tl.sum(tl.where(within, u * u, 0.0), axis=1) + EPS) * tl.where(
        block < KEY_HEADS, scale, 1.0
    )
    u = u * tl.where(is_key, factor, 1.0)[:, None]
    tl.store(mixed + t.to(tl.int64)[:, None] * channels + channel, u.to(mixed.dtype.element_ty), mask=within)


@triton.jit
def _intra_kernel(
    mixed,
    gates,
    inverse,
    attention,
    total,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DK: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (value head, chunk): T and tril(q k^T e^(G_i - G_j)), both [64, 64], and G."""
    h, chunk = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, 64)
    k = tl.arange(0, BLOCK_K)
    rows = chunk.to(tl.int64) * 64 + i
    at = mixed + rows[:, None] * CHANNELS + h // (VALUE_HEADS // KEY_HEADS) * DK + k[None, :]
    query = tl.load(at, mask=(k < DK)[None, :], other=0.0)
    key = tl.load(at + KEY_HEADS * DK, mask=(k < DK)[None, :], other=0.0)
    beta = tl.load(gates + rows * (2 * VALUE_HEADS) + h)
    grown = tl.cumsum(tl.load(gates + rows * (2 * VALUE_HEADS) + VALUE_HEADS + h), axis=0)
    tl.store(total + rows * VALUE_HEADS + h, grown)

    lower = i[:, None] >= i[None, :]
    decay = tl.exp(tl.where(lower, grown[:, None] - grown[None, :], -float("inf")))
    square = (rows[:, None] * VALUE_HEADS + h) * 64 + i[None, :]
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * decay
    tl.store(attention + square, scores.to(attention.dtype.element_ty))
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * decay * beta[:, None]
    system = tl.where(i[:, None] > i[None, :], system, 0.0)

    # T by doubling: of blocks of 2 it is I - A, and two neighbours D with L below them give D - D L D. Its entries stay
    # near 1 whatever the keys, which those of the powers of A would not.
    kind: tl.constexpr = tl.float16 if mixed.dtype.element_ty == tl.bfloat16 else tl.float32
    row, column = i[:, None], i[None, :]
    solved = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, system, 0.0)
    for level in tl.static_range(1, 6):
        below = (row // 2 ** (level + 1) == column // 2 ** (level + 1)) & (
            row // 2**level > column // 2**level
        )
        factor = solved.to(kind)
        lower_part = tl.where(below, system, 0.0).to(kind)
        inner = tl.dot(lower_part, factor, input_precision=PRECISION)
        solved -= tl.dot(factor, inner.to(kind), input_precision=PRECISION)
    tl.store(inverse + square, solved.to(inverse.dtype.element_ty))


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    mixed,
    gates,
    inverse,
    attention,
    total,
    state,
    out,
    chunks,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (columns of the state, value head): S [dk, TILE] through all chunks."""
    tile, h = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, 64)
    long = i.to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    v = tile * TILE + tl.arange(0, TILE)
    in_k, in_v = k < DK, v < DV
    key_head = h // (VALUE_HEADS // KEY_HEADS) * DK
    cells = state + h * DK * DV + k[:, None] * DV + v[None, :]
    inside = in_k[:, None] & in_v[None, :]
    current = tl.load(cells, mask=inside, other=0.0)
    kind: tl.constexpr = mixed.dtype.element_ty
    for chunk in range(chunks):
        rows = chunk * 64 + long
        at = mixed + rows[:, None] * CHANNELS
        query = tl.load(at + key_head + k[None, :], mask=in_k[None, :], other=0.0)
        key = tl.load(at + KEY_HEADS * DK + key_head + k[None, :], mask=in_k[None, :], other=0.0)
        value = tl.load(at + 2 * KEY_HEADS * DK + h * DV + v[None, :], mask=in_v[None, :], other=0.0)
        square = (rows[:, None] * VALUE_HEADS + h) * 64 + i[None, :]
        solve = tl.load(inverse + square)
        scores = tl.load(attention + square)
        beta = tl.load(gates + rows * (2 * VALUE_HEADS) + h)
        grown = tl.load(total + rows * VALUE_HEADS + h)
        last = tl.load(total + (chunk * 64 + 63) * VALUE_HEADS + h)

        operand = current.to(kind)
        gain = tl.exp(grown)[:, None]
        read = tl.dot(key, operand, input_precision=PRECISION)
        fresh = beta[:, None] * (value.to(tl.float32) - gain * read)
        fresh = tl.dot(solve, fresh.to(kind), input_precision=PRECISION)
        seen = gain * tl.dot(query, operand, input_precision=PRECISION)
        seen = tl.dot(scores, fresh.to(kind), seen, input_precision=PRECISION)
        tl.store(
            out + (rows[:, None] * VALUE_HEADS + h) * DV + v[None, :],
            seen.to(out.dtype.element_ty),
            mask=in_v[None, :],
        )
        kept = (fresh * tl.exp(last - grown)[:, None]).to(kind)
        current = tl.dot(tl.trans(key), kept, current * tl.exp(last), input_precision=PRECISION)
    tl.store(cells, current, mask=inside)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Rows as the other two launches read them."""

    mixed: Tensor
    """[n, channels] in the activations' type: q and k normalised, q scaled."""
    gates: Tensor
    """[n, 2, value_heads] float32: beta, then g."""


def prefill_rows(
    y: Tensor, weights: MixWeights, state: Tensor, window: Tensor, rows: int, shape: DeltaShape
) -> Tensor:
    """y [n, ...] contiguous, n a multiple of 64 -> o [n, value_heads, dv] in the type of y; see the twin's `prefill`."""
    packed = _pack(y, weights, window, rows, shape)
    count, precision = y.shape[0], "tf32" if y.dtype == torch.bfloat16 else "ieee"
    squares = torch.empty(2, count, shape.value_heads, ROWS, dtype=y.dtype, device=y.device)
    total = torch.empty(count, shape.value_heads, dtype=torch.float32, device=y.device)
    block_k = max(16, triton.next_power_of_2(shape.key_dim))
    _intra_kernel[(shape.value_heads, count // ROWS)](
        packed.mixed,
        packed.gates,
        squares[0],
        squares[1],
        total,
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        DK=shape.key_dim,
        CHANNELS=shape.channels,
        BLOCK_K=block_k,
        PRECISION=precision,
        num_warps=4,
    )
    out = torch.empty(count, shape.value_heads, shape.value_dim, dtype=y.dtype, device=y.device)
    tile = max(16, min(_VALUE_TILE, triton.next_power_of_2(shape.value_dim)))
    _scan_kernel[(triton.cdiv(shape.value_dim, tile), shape.value_heads)](
        packed.mixed,
        packed.gates,
        squares[0],
        squares[1],
        total,
        state,
        out,
        count // ROWS,
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        DK=shape.key_dim,
        DV=shape.value_dim,
        CHANNELS=shape.channels,
        BLOCK_K=block_k,
        TILE=tile,
        PRECISION=precision,
        num_warps=4,
        num_stages=3 if y.dtype == torch.bfloat16 else 1,
    )
    return out


def _pack(y: Tensor, weights: MixWeights, window: Tensor, rows: int, shape: DeltaShape) -> _Packed:
    """Convolution, silu, norms and gates; advances the window."""
    count, taps = y.shape[0], weights.conv.shape[0]
    mixed = torch.empty(count, shape.channels, dtype=y.dtype, device=y.device)
    gates = torch.empty(count, 2, shape.value_heads, dtype=torch.float32, device=y.device)
    widest = max(shape.key_dim, shape.value_dim)
    _pack_kernel[(2 * shape.key_heads + shape.value_heads + 1, count // _PACK_ROWS)](
        y,
        weights.conv,
        weights.rate,
        weights.dt_bias,
        window,
        mixed,
        gates,
        rows,
        shape.key_dim**-0.5,
        EPS=EPS,
        Y_ROW=y.shape[1],
        TAPS=taps,
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        DK=shape.key_dim,
        DV=shape.value_dim,
        BLOCK=triton.next_power_of_2(widest),
        GATES=triton.next_power_of_2(shape.value_heads),
        TILE=_PACK_ROWS,
        num_warps=4,
    )
    start = rows - (taps - 1)
    if start >= 0:
        window.copy_(y[start:rows, : shape.channels])
    else:
        window.copy_(torch.cat([window[start:], y[:rows, : shape.channels]]))
    return _Packed(mixed, gates)
