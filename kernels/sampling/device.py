"""The pick in Triton.

A row is cut into splits of 4,096 ids, a constant.

    _peaks             largest logit of every split, and its smallest id (a NaN counts as infinity, so that it is seen)
    _scores            best tempered logit + noise of every split, for rows that sample all ids; sums for logprobs
    bounds_kernel      for rows with a top-k: the k-th largest peak of parts of splits, which k ids at least reach
    candidates_kernel  for those rows: the ids that reach it, few more than k, from the splits that have any
    _choose            one program a row: combine the splits, or sort the candidates, truncate and sample them

Candidates are gathered in any order and then sorted by keys that no two share, so the order leaves no trace.
Noise is evaluated where it is used. Four ids share a Philox counter; without an id map a program asks for each once.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.card_noise import NO_ID, gumbel, row_top, uniform_of, uniform_run
from kernels.sampling.card_truncation import bounds_kernel, candidates_kernel, pick_of_candidates
from kernels.sampling.plan import TOP_K_LIMIT, PickPlan, Picks
from kernels.tiles import PICK_SPLIT

_PARTS: Final = 8
"""Parts of a split whose peaks bound the k-th largest logit of a row: the more parts, the fewer candidates."""

_FEW: Final = 256
"""Candidates of a row that are sorted at once; ties can make them more."""


@triton.jit(do_not_specialize=["stride"])
def _peaks(
    logits, id_map, peaks, ids, part_peaks, vocab, stride,
    SPLIT: tl.constexpr, MAPPED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = split * SPLIT + tl.arange(0, SPLIT)
    live = at < vocab
    x = tl.load(logits + row * stride + at, mask=live, other=-float("inf"))
    names = tl.load(id_map + at, mask=live, other=0) if MAPPED else at
    x = tl.where(x == x, x, float("inf"))
    if PARTS > 0:
        parts = tl.max(tl.reshape(x, [PARTS, SPLIT // PARTS]), axis=1)
        tl.store(part_peaks + (row * splits + split) * PARTS + tl.arange(0, PARTS), parts)
    top = tl.max(x, axis=0)
    tl.store(peaks + row * splits + split, top)
    tl.store(ids + row * splits + split, tl.min(tl.where((x == top) & live, names, NO_ID), axis=0))


@triton.jit
def _least_score(peaks, peak_ids, row, splits, top, seed, position, choice, SPLITS: tl.constexpr):
    """The score of the row's largest logit, which the winner reaches: 0 and the noise of its id."""
    at = tl.arange(0, SPLITS)
    live = at < splits
    peak = tl.load(peaks + row * splits + at, mask=live, other=-float("inf"))
    names = tl.load(peak_ids + row * splits + at, mask=live, other=NO_ID)
    best = tl.min(tl.where(peak == top, names, NO_ID), axis=0)
    return tl.max(gumbel(uniform_of(tl.zeros([16], tl.int32) + best, seed, position, choice)), axis=0)


@triton.jit(do_not_specialize=["stride", "columns"])
def _scores(
    logits, id_map, peaks, peak_ids, best, ids, sums, starts, temperatures, seeds, choices, top_ks, min_p_logs,
    vocab, stride, columns, SPLIT: tl.constexpr, SPLITS: tl.constexpr, MAPPED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """z + G >= s asks for -log1p(-w) <= exp(z - s), hence for w <= exp(z - s): no logarithm for splits where none is."""
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    sequence = row // columns
    temperature = tl.load(temperatures + sequence)
    samples = (temperature > 0.0) & (tl.load(top_ks + sequence) == 0)
    top = row_top(peaks, row, splits, SPLITS)
    if (top > -float("inf")) & (top < float("inf")) & (samples | SUMS):
        at = split * SPLIT + tl.arange(0, SPLIT)
        live = at < vocab
        x = tl.load(logits + row * stride + at, mask=live, other=-float("inf")) - top
        if SUMS:
            tl.store(sums + row * splits + split, tl.sum(tl.exp(x), axis=0))
        if samples:
            position = tl.load(starts + sequence) + (row % columns).to(tl.int32) + 1
            seed, choice = tl.load(seeds + sequence), tl.load(choices + sequence)
            if MAPPED:
                names = tl.load(id_map + at, mask=live, other=0)
                w = uniform_of(names, seed, position, choice)
            else:
                names = at
                w = uniform_run(split * SPLIT, seed, position, choice, SPLIT)
            least = _least_score(peaks, peak_ids, row, splits, top, seed, position, choice, SPLITS)
            may_win = live & (w <= 1.01 * tl.exp(x / temperature - least))
            mine = row * splits + split
            if tl.max(may_win.to(tl.int32), axis=0) > 0:
                z = tl.div_rn(x, tl.zeros_like(x) + temperature)
                z = tl.where(z >= tl.load(min_p_logs + sequence), z, -float("inf"))
                scores = tl.where(live, z + gumbel(w), -float("inf"))
                top_score = tl.max(scores, axis=0)
                tl.store(best + mine, top_score)
                tl.store(ids + mine, tl.min(tl.where((scores == top_score) & live, names, NO_ID), axis=0))
            else:
                tl.store(best + mine, -float("inf"))
                tl.store(ids + mine, NO_ID)


@triton.jit(do_not_specialize=["splits", "columns", "stride"])
def _choose(
    logits, peaks, peak_ids, best, best_ids, keys, found, sums, starts, temperatures, seeds, choices, top_ks, top_ps,
    min_p_logs, out, logprobs, splits, stride, columns, SPLITS: tl.constexpr, FEW: tl.constexpr,
    ROOM: tl.constexpr, BEST: tl.constexpr, TRUNCATE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sequence = row // columns
    top = row_top(peaks, row, splits, SPLITS)
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
        tl.load(best_ids + offsets, mask=live, other=NO_ID),
        tl.load(peak_ids + offsets, mask=live, other=NO_ID),
    )
    chosen = tl.min(tl.where(live & (value == tl.max(value, axis=0)), name, NO_ID), axis=0)
    if TRUNCATE:  # noqa: SIM102 - the compiler's branch, then the program's
        if fine & truncates:
            position = tl.load(starts + sequence) + (row % columns).to(tl.int32) + 1
            chosen = pick_of_candidates(
                keys + row * ROOM, tl.load(found + row), tl.load(seeds + sequence), position,
                tl.load(choices + sequence), top_k, tl.load(top_ps + sequence), tl.load(min_p_logs + sequence),
                FEW, ROOM, BEST,
            )  # fmt: skip
    picked = tl.where(fine, chosen, -1)
    tl.store(out + row, picked)
    if SUMS:
        total = tl.sum(tl.load(sums + offsets, mask=at < tl.where(fine, splits, 0), other=0.0), axis=0)
        x = tl.load(logits + row * stride + tl.where(fine, chosen, 0), mask=fine, other=float("nan"))
        tl.store(logprobs + row, x - tl.where(fine, top, 0.0) - tl.log(tl.where(fine, total, 1.0)))


def pick(
    logits: Tensor,
    plan: PickPlan,
    *,
    id_map: Tensor | None = None,
    logprobs: bool = False,
    split: int = PICK_SPLIT,
) -> Picks:
    """As the twin. `logits` may have a row stride; `split` is for tests with small vocabularies."""
    rows, vocab = logits.shape
    splits = triton.cdiv(vocab, split)
    width = triton.next_power_of_2(splits)
    parts = min(_PARTS, split // 2) if plan.truncate else 0
    made = _Work(rows, splits, parts, logits.device)
    names = logits if id_map is None else id_map
    mapped, grid, stride = id_map is not None, (rows, splits), logits.stride(0)
    _peaks[grid](
        logits, names, made.peaks, made.peak_ids, made.part_peaks, vocab, stride, SPLIT=split, MAPPED=mapped,
        PARTS=parts, num_warps=4,
    )  # fmt: skip
    _scores[grid](
        logits, names, made.peaks, made.peak_ids, made.best, made.best_ids, made.sums, plan.starts, plan.temperature,
        plan.seeds, plan.choices, plan.top_k, plan.min_p_log, vocab, stride, plan.columns, SPLIT=split, SPLITS=width,
        MAPPED=mapped, SUMS=logprobs, num_warps=8,
    )  # fmt: skip
    keep = min(TOP_K_LIMIT, split)
    room = width * keep
    if plan.truncate:
        made.keys = torch.empty(rows * room, dtype=torch.int64, device=logits.device)
        bounds_kernel[(rows,)](
            made.peaks, made.part_peaks, made.bounds, made.found, plan.temperature, plan.top_k, splits, plan.columns,
            SPLITS=width, PARTS=parts, KEEP=min(TOP_K_LIMIT, width * parts), num_warps=4,
        )  # fmt: skip
        candidates_kernel[grid](
            logits, names, made.peaks, made.bounds, made.found, made.keys, plan.temperature, plan.top_k, vocab, stride,
            plan.columns, SPLIT=split, SPLITS=width, MAPPED=mapped, KEEP=keep, ROOM=room, num_warps=8,
        )  # fmt: skip
    ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    told = torch.empty(rows if logprobs else 0, dtype=torch.float32, device=logits.device)
    _choose[(rows,)](
        logits, made.peaks, made.peak_ids, made.best, made.best_ids, made.keys, made.found, made.sums, plan.starts,
        plan.temperature, plan.seeds, plan.choices, plan.top_k, plan.top_p, plan.min_p_log, ids, told, splits, stride,
        plan.columns, SPLITS=width, FEW=min(_FEW, room), ROOM=room, BEST=min(TOP_K_LIMIT, room),
        TRUNCATE=plan.truncate, SUMS=logprobs, num_warps=4,
    )  # fmt: skip
    return Picks(ids, told if logprobs else None)


class _Work:
    """What the launches of one pick pass on."""

    def __init__(self, rows: int, splits: int, parts: int, device: torch.device) -> None:
        self.peaks, self.best, self.sums = torch.empty(3, rows, splits, dtype=torch.float32, device=device)
        self.peak_ids, self.best_ids = torch.empty(2, rows, splits, dtype=torch.int32, device=device)
        self.part_peaks = torch.empty(rows, splits * parts, dtype=torch.float32, device=device)
        self.bounds = torch.empty(rows, dtype=torch.float32, device=device)
        self.found = torch.empty(rows, dtype=torch.int32, device=device)
        self.keys = torch.empty(0, dtype=torch.int64, device=device)
