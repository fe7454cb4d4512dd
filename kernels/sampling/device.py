"""The pick and the accept walk in Triton.

A row is cut into splits of 4,096 ids, a constant. Three launches, the third of which adds nothing in floating point:

    _peaks    largest logit of every split, and its smallest id (a NaN counts as infinity, so that it is seen)
    _scores   best tempered logit + noise of every split, for rows that sample the whole vocabulary; sums for logprobs
    _sorted   the TOP_K_LIMIT best of every split by (tempered logit, id), for rows with a top-k
    _choose   one program a row: combine the splits by comparison, or truncate the candidates and sample them

Noise is evaluated where it is used. Four ids share a Philox counter; without an id map a program asks for each once.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.plan import TOP_K_LIMIT, PickPlan, Picks, Walk

SPLIT: Final = 4096
"""Ids of one program. Never derived from a batch: it decides how logprob sums are added."""

_NO_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _gumbel(bits):
    """uint32 -> standard Gumbel; log1p by Kahan's quotient, which needs no library."""
    w = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    u = 1.0 - w
    log1p = tl.where(u == 1.0, -w, tl.log(u) * (w / tl.where(u == 1.0, 1.0, 1.0 - u)))
    return -tl.log(-log1p)


@triton.jit
def _noise_of(ids, seed, position, choice):
    """Noise of any ids, int32 [N]."""
    zero = ids * 0
    a, b, c, d = tl.philox(seed, ids >> 2, zero + position, zero, zero + choice)
    lane = ids & 3
    return _gumbel(tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d)))


@triton.jit
def _noise_run(first, seed, position, choice, COUNT: tl.constexpr):
    """Noise of ids first..first + COUNT - 1; first is a multiple of 4."""
    groups = first // 4 + tl.arange(0, COUNT // 4)
    zero = groups * 0
    a, b, c, d = tl.philox(seed, groups, zero + position, zero, zero + choice)
    return _gumbel(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@triton.jit
def _row_top(peaks, row, splits, SPLITS: tl.constexpr):
    """The largest logit of a row from its splits' peaks."""
    at = tl.arange(0, SPLITS)
    return tl.max(tl.load(peaks + row * splits + at, mask=at < splits, other=-float("inf")), axis=0)


@triton.jit(do_not_specialize=["stride"])
def _peaks(logits, id_map, peaks, ids, vocab, stride, SPLIT: tl.constexpr, MAPPED: tl.constexpr):
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = split * SPLIT + tl.arange(0, SPLIT)
    live = at < vocab
    x = tl.load(logits + row * stride + at, mask=live, other=-float("inf"))
    names = tl.load(id_map + at, mask=live, other=0) if MAPPED else at
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, axis=0)
    tl.store(peaks + row * splits + split, top)
    tl.store(ids + row * splits + split, tl.min(tl.where((x == top) & live, names, _NO_ID), axis=0))


@triton.jit(do_not_specialize=["stride", "columns"])
def _scores(
    logits, id_map, peaks, best, ids, sums, starts, temperatures, seeds, choices, top_ks, min_p_logs,
    vocab, stride, columns, SPLIT: tl.constexpr, SPLITS: tl.constexpr, MAPPED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    sequence = row // columns
    temperature = tl.load(temperatures + sequence)
    samples = (temperature > 0.0) & (tl.load(top_ks + sequence) == 0)
    top = _row_top(peaks, row, splits, SPLITS)
    if (top > -float("inf")) & (top < float("inf")) & (samples | SUMS):
        at = split * SPLIT + tl.arange(0, SPLIT)
        live = at < vocab
        x = tl.load(logits + row * stride + at, mask=live, other=-float("inf")) - top
        if SUMS:
            tl.store(sums + row * splits + split, tl.sum(tl.exp(x), axis=0))
        if samples:
            position = tl.load(starts + sequence) + (row % columns).to(tl.int32) + 1
            seed, choice = tl.load(seeds + sequence), tl.load(choices + sequence)
            z = tl.div_rn(x, tl.zeros_like(x) + temperature)
            z = tl.where(z >= tl.load(min_p_logs + sequence), z, -float("inf"))
            if MAPPED:
                names = tl.load(id_map + at, mask=live, other=0)
                scores = z + _noise_of(names, seed, position, choice)
            else:
                names = at
                scores = z + _noise_run(split * SPLIT, seed, position, choice, SPLIT)
            scores = tl.where(live, scores, -float("inf"))
            top_score = tl.max(scores, axis=0)
            tl.store(best + row * splits + split, top_score)
            tl.store(
                ids + row * splits + split,
                tl.min(tl.where((scores == top_score) & live, names, _NO_ID), axis=0),
            )


@triton.jit
def _key(z, names):
    """int64 whose order is (z descending, id ascending) reversed: the largest key comes first."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - names).to(tl.int64)


@triton.jit(do_not_specialize=["stride", "columns"])
def _sorted(
    logits, id_map, peaks, keys, temperatures, top_ks, vocab, stride, columns,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, MAPPED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    sequence = row // columns
    temperature = tl.load(temperatures + sequence)
    top = _row_top(peaks, row, splits, SPLITS)
    fine = (top > -float("inf")) & (top < float("inf"))
    if fine & (temperature > 0.0) & (tl.load(top_ks + sequence) > 0):
        at = split * SPLIT + tl.arange(0, SPLIT)
        live = at < vocab
        x = tl.load(logits + row * stride + at, mask=live, other=-float("inf")) - top
        z = tl.div_rn(x, tl.zeros_like(x) + temperature)
        names = tl.load(id_map + at, mask=live, other=_NO_ID) if MAPPED else tl.where(live, at, _NO_ID)
        kept = tl.topk(_key(z, names), KEEP)
        tl.store(keys + (row * splits + split) * KEEP + tl.arange(0, KEEP), kept)


@triton.jit
def _of_candidates(
    keys, row, splits, seed, position, choice, top_k, top_p, min_p_log,
    CANDIDATES: tl.constexpr, KEEP: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """The id picked among a row's sorted candidates after min-p, top-k and top-p."""
    at = tl.arange(0, CANDIDATES)
    lowest = -0x7FFFFFFFFFFFFFFF
    loaded = tl.load(keys + row * splits * KEEP + at, mask=at < splits * KEEP, other=lowest)
    best = tl.topk(loaded, BEST)
    rank = tl.arange(0, BEST)
    names = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    ordered = (best >> 32).to(tl.int32)
    z = tl.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    real = (rank < top_k) & (best > lowest) & (names != _NO_ID)
    z = tl.where(real & (z >= min_p_log), z, -float("inf"))
    mass = tl.exp(z.to(tl.float64))
    before = tl.cumsum(mass, axis=0) - mass
    limit = tl.where(top_p < 1.0, top_p * tl.sum(mass, axis=0), float("inf"))
    z = tl.where((rank == 0) | (before < limit), z, -float("inf"))
    scores = z + _noise_of(tl.where(real, names, 0), seed, position, choice)
    top_score = tl.max(scores, axis=0)
    return tl.min(tl.where((scores == top_score) & real, names, _NO_ID), axis=0)


@triton.jit(do_not_specialize=["splits", "columns", "stride"])
def _choose(
    logits, peaks, peak_ids, best, best_ids, keys, sums, starts, temperatures, seeds, choices, top_ks, top_ps,
    min_p_logs, out, logprobs, splits, stride, columns, SPLITS: tl.constexpr, CANDIDATES: tl.constexpr,
    KEEP: tl.constexpr, BEST: tl.constexpr, TRUNCATE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sequence = row // columns
    top = _row_top(peaks, row, splits, SPLITS)
    at = tl.arange(0, SPLITS)
    fine = (top > -float("inf")) & (top < float("inf"))
    temperature, top_k = tl.load(temperatures + sequence), tl.load(top_ks + sequence)
    samples = temperature > 0.0
    truncates = samples & (top_k > 0)
    offsets, live = row * splits + at, at < tl.where(truncates | (not fine), 0, splits)
    value = tl.where(
        samples,
        tl.load(best + offsets, mask=live, other=-float("inf")),
        tl.load(peaks + offsets, mask=live, other=-float("inf")),
    )
    name = tl.where(
        samples,
        tl.load(best_ids + offsets, mask=live, other=_NO_ID),
        tl.load(peak_ids + offsets, mask=live, other=_NO_ID),
    )
    chosen = tl.min(tl.where(live & (value == tl.max(value, axis=0)), name, _NO_ID), axis=0)
    if TRUNCATE:  # noqa: SIM102 - the compiler's branch, then the program's
        if fine & truncates:
            position = tl.load(starts + sequence) + (row % columns).to(tl.int32) + 1
            chosen = _of_candidates(
                keys, row, splits, tl.load(seeds + sequence), position, tl.load(choices + sequence), top_k,
                tl.load(top_ps + sequence), tl.load(min_p_logs + sequence), CANDIDATES, KEEP, BEST,
            )  # fmt: skip
    picked = tl.where(fine, chosen, -1)
    tl.store(out + row, picked)
    if SUMS:
        total = tl.sum(tl.load(sums + offsets, mask=at < tl.where(fine, splits, 0), other=0.0), axis=0)
        x = tl.load(logits + row * stride + tl.where(fine, chosen, 0), mask=fine, other=float("nan"))
        tl.store(logprobs + row, x - tl.where(fine, top, 0.0) - tl.log(tl.where(fine, total, 1.0)))


@triton.jit(do_not_specialize=["pick_stride", "draft_stride", "columns"])
def _walk(
    picks, drafts, counts, accepted, anchors, rows, pick_stride, draft_stride, columns, WIDTH: tl.constexpr
):
    sequence = tl.program_id(0)
    count = tl.load(counts + sequence)
    at = tl.arange(0, WIDTH)
    inside = at < count - 1
    pick = tl.load(picks + sequence * pick_stride + at, mask=inside, other=-1)
    draft = tl.load(drafts + sequence * draft_stride + at, mask=inside, other=-2)
    stood = tl.min(tl.where(inside & (pick == draft), WIDTH, at), axis=0)
    stood = tl.maximum(tl.minimum(stood, count - 1), 0)
    anchor = tl.load(picks + sequence * pick_stride + stood)
    tl.store(accepted + sequence, stood)
    tl.store(anchors + sequence, tl.where(count > 0, tl.maximum(anchor, 0), 0))
    tl.store(rows + sequence, sequence * columns + stood)


def pick(
    logits: Tensor,
    plan: PickPlan,
    *,
    id_map: Tensor | None = None,
    logprobs: bool = False,
    split: int = SPLIT,
) -> Picks:
    """As the twin. `logits` may have a row stride; `split` is for tests with small vocabularies."""
    rows, vocab = logits.shape
    splits = triton.cdiv(vocab, split)
    width = triton.next_power_of_2(splits)
    made = _Work(rows, splits, logits.device)
    names = logits if id_map is None else id_map
    mapped, grid, stride = id_map is not None, (rows, splits), logits.stride(0)
    _peaks[grid](
        logits, names, made.peaks, made.peak_ids, vocab, stride, SPLIT=split, MAPPED=mapped, num_warps=4
    )
    _scores[grid](
        logits, names, made.peaks, made.best, made.best_ids, made.sums, plan.starts, plan.temperature, plan.seeds,
        plan.choices, plan.top_k, plan.min_p_log, vocab, stride, plan.columns, SPLIT=split, SPLITS=width,
        MAPPED=mapped, SUMS=logprobs, num_warps=8,
    )  # fmt: skip
    keep = min(TOP_K_LIMIT, split)
    keys = made.peak_ids
    if plan.truncate:
        keys = torch.empty(rows * splits * keep, dtype=torch.int64, device=logits.device)
        _sorted[grid](
            logits, names, made.peaks, keys, plan.temperature, plan.top_k, vocab, stride, plan.columns,
            SPLIT=split, SPLITS=width, MAPPED=mapped, KEEP=keep, num_warps=8,
        )  # fmt: skip
    ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    told = torch.empty(rows if logprobs else 0, dtype=torch.float32, device=logits.device)
    _choose[(rows,)](
        logits, made.peaks, made.peak_ids, made.best, made.best_ids, keys, made.sums, plan.starts, plan.temperature,
        plan.seeds, plan.choices, plan.top_k, plan.top_p, plan.min_p_log, ids, told, splits, stride, plan.columns,
        SPLITS=width, CANDIDATES=width * keep, KEEP=keep, BEST=min(TOP_K_LIMIT, width * keep), TRUNCATE=plan.truncate, SUMS=logprobs, num_warps=8,
    )  # fmt: skip
    return Picks(ids, told if logprobs else None)


def accept_walk(picks: Tensor, drafts: Tensor, counts: Tensor) -> Walk:
    """As the twin; rows of `picks` and `drafts` may be strided."""
    sequences, columns = picks.shape
    made = torch.empty(3, sequences, dtype=torch.int32, device=picks.device)
    _walk[(sequences,)](
        picks, drafts, counts, made[0], made[1], made[2], picks.stride(0), drafts.stride(0), columns,
        WIDTH=triton.next_power_of_2(columns), num_warps=1,
    )  # fmt: skip
    return Walk(made[0], made[1], made[2])


class _Work:
    """What the launches of one pick pass on, [R, splits] each."""

    def __init__(self, rows: int, splits: int, device: torch.device) -> None:
        self.peaks, self.best, self.sums = torch.empty(3, rows, splits, dtype=torch.float32, device=device)
        self.peak_ids, self.best_ids = torch.empty(2, rows, splits, dtype=torch.int32, device=device)
