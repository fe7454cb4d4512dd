"""Gumbel noise where it is used: Philox counters of four ids, the twin's layout; and what all launches of a pick share."""

from __future__ import annotations

import triton
import triton.language as tl

NO_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""Larger than any id."""


@triton.jit
def _gumbel(bits):
    """uint32 -> standard Gumbel; log1p by Kahan's quotient, which needs no library."""
    w = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    u = 1.0 - w
    log1p = tl.where(u == 1.0, -w, tl.log(u) * (w / tl.where(u == 1.0, 1.0, 1.0 - u)))
    return -tl.log(-log1p)


@triton.jit
def noise_of(ids, seed, position, choice):
    """Noise of any ids, int32 [N]."""
    zero = ids * 0
    a, b, c, d = tl.philox(seed, ids >> 2, zero + position, zero, zero + choice)
    lane = ids & 3
    return _gumbel(tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d)))


@triton.jit
def noise_run(first, seed, position, choice, COUNT: tl.constexpr):
    """Noise of ids first..first + COUNT - 1; first is a multiple of 4."""
    groups = first // 4 + tl.arange(0, COUNT // 4)
    zero = groups * 0
    a, b, c, d = tl.philox(seed, groups, zero + position, zero, zero + choice)
    return _gumbel(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@triton.jit
def row_top(peaks, row, splits, SPLITS: tl.constexpr):
    """The largest logit of a row from its splits' peaks."""
    at = tl.arange(0, SPLITS)
    return tl.max(tl.load(peaks + row * splits + at, mask=at < splits, other=-float("inf")), axis=0)
