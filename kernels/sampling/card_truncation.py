"""Top-k, top-p and min-p on a card: a bound that k ids at least reach, the few ids that reach it, and their sort.

Order is by (tempered logit descending, id ascending), packed into one integer, so that sorts have no ties.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.card_noise import NO_ID, gumbel, row_top, uniform_of


@triton.jit
def _key(z, names):
    """int64 whose order is (z descending, id ascending) reversed: the largest key comes first."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - names).to(tl.int64)


@triton.jit
def _truncates(top, temperature, top_k):
    """Whether a row is picked from sorted candidates."""
    return (top > -float("inf")) & (top < float("inf")) & (temperature > 0.0) & (top_k > 0)


@triton.jit(do_not_specialize=["splits", "columns"])
def bounds_kernel(
    peaks, part_peaks, bounds, found, temperatures, top_ks, splits, columns,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The top_k-th largest tempered peak of a row's parts into bounds float32 [row]; found [row] to 0. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // columns
    temperature, top_k = tl.load(temperatures + sequence), tl.load(top_ks + sequence)
    top = row_top(peaks, row, splits, SPLITS)
    tl.store(found + row, 0)
    if _truncates(top, temperature, top_k):
        at = tl.arange(0, SPLITS * PARTS)
        x = (
            tl.load(part_peaks + row * splits * PARTS + at, mask=at < splits * PARTS, other=-float("inf"))
            - top
        )
        best = tl.topk(tl.div_rn(x, tl.zeros_like(x) + temperature), KEEP)
        rank = tl.arange(0, KEEP)
        bound = tl.max(tl.where(rank == top_k - 1, best, -float("inf")), axis=0)
        tl.store(bounds + row, bound)


@triton.jit(do_not_specialize=["stride", "columns"])
def candidates_kernel(
    logits, id_map, peaks, bounds, found, keys, temperatures, top_ks, vocab, stride, columns,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, MAPPED: tl.constexpr, KEEP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Keys of a split's ids that reach the bound, at most its KEEP best, behind keys int64 [row, ROOM]; found counts them.
    Grid (rows, splits).
    """
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    sequence = row // columns
    temperature, top_k = tl.load(temperatures + sequence), tl.load(top_ks + sequence)
    top = row_top(peaks, row, splits, SPLITS)
    if _truncates(top, temperature, top_k):
        bound = tl.load(bounds + row)
        if tl.div_rn(tl.load(peaks + row * splits + split) - top, temperature) >= bound:
            at = split * SPLIT + tl.arange(0, SPLIT)
            live = at < vocab
            x = tl.load(logits + row * stride + at, mask=live, other=-float("inf")) - top
            z = tl.div_rn(x, tl.zeros_like(x) + temperature)
            names = tl.load(id_map + at, mask=live, other=NO_ID) if MAPPED else tl.where(live, at, NO_ID)
            reaches = (z >= bound) & live
            count = tl.sum(reaches.to(tl.int32), axis=0)
            if count <= KEEP:
                place = tl.atomic_add(found + row, count, sem="relaxed")
                within = tl.cumsum(reaches.to(tl.int32), axis=0) - 1
                tl.store(keys + row * ROOM + place + within, _key(z, names), mask=reaches)
            else:
                place = tl.atomic_add(found + row, KEEP, sem="relaxed")
                kept = tl.topk(_key(z, names), KEEP)
                tl.store(keys + row * ROOM + place + tl.arange(0, KEEP), kept)


@triton.jit
def _best(keys, count, ROOM: tl.constexpr, BEST: tl.constexpr, LOWEST: tl.constexpr):
    """The first BEST of `count` keys in at most ROOM."""
    at = tl.arange(0, ROOM)
    return tl.topk(tl.load(keys + at, mask=at < count, other=LOWEST), BEST)


@triton.jit
def pick_of_candidates(
    keys, count, seed, position, choice, top_k, top_p, min_p_log,
    FEW: tl.constexpr, ROOM: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """The id picked among a row's candidates, sorted, after min-p, top-k and top-p. More than FEW are rare."""
    lowest: tl.constexpr = -0x7FFFFFFFFFFFFFFF
    if count <= FEW:  # noqa: SIM108 - a branch: one of the two sorts is far longer
        best = _best(keys, count, FEW, BEST, lowest)
    else:
        best = _best(keys, count, ROOM, BEST, lowest)
    rank = tl.arange(0, BEST)
    names = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    ordered = (best >> 32).to(tl.int32)
    z = tl.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    real = (rank < top_k) & (best > lowest) & (names != NO_ID)
    z = tl.where(real & (z >= min_p_log), z, -float("inf"))
    mass = tl.exp(z.to(tl.float64))
    before = tl.cumsum(mass, axis=0) - mass
    limit = tl.where(top_p < 1.0, top_p * tl.sum(mass, axis=0), float("inf"))
    z = tl.where((rank == 0) | (before < limit), z, -float("inf"))
    scores = z + gumbel(uniform_of(tl.where(real, names, 0), seed, position, choice))
    top_score = tl.max(scores, axis=0)
    return tl.min(tl.where((scores == top_score) & real, names, NO_ID), axis=0)
