"""Gumbel noise where it is used: Philox counters of four ids, the twin's layout; and what all launches of a pick share."""

from __future__ import annotations

import triton
import triton.language as tl

NO_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""Larger than any id."""


@triton.jit
def _uniform(bits):
    """uint32 -> w in (0, 1), float32; what exceeds w with a small w is large noise."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def uniform_of(ids, seed, position, choice):
    """w of any ids, int32 [N]."""
    zero = ids * 0
    a, b, c, d = tl.philox(seed, ids >> 2, zero + position, zero, zero + choice)
    lane = ids & 3
    return _uniform(tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d)))


@triton.jit
def uniform_run(first, seed, position, choice, COUNT: tl.constexpr):
    """w of ids first..first + COUNT - 1; first is a multiple of 4."""
    groups = first // 4 + tl.arange(0, COUNT // 4)
    zero = groups * 0
    a, b, c, d = tl.philox(seed, groups, zero + position, zero, zero + choice)
    return _uniform(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@triton.jit
def gumbel(w):
    """-log(-log1p(-w)): standard Gumbel noise; log1p by Kahan's quotient, which needs no library."""
    u = 1.0 - w
    log1p = tl.where(u == 1.0, -w, tl.log(u) * (w / tl.where(u == 1.0, 1.0, 1.0 - u)))
    return -tl.log(-log1p)


@triton.jit
def row_top(peaks, row, splits, SPLITS: tl.constexpr):
    """The largest logit of a row from its splits' peaks."""
    at = tl.arange(0, SPLITS)
    return tl.max(tl.load(peaks + row * splits + at, mask=at < splits, other=-float("inf")), axis=0)
