"""Compares what a cell gave with its reference: token ids, log probabilities, the ending, and the cache, all by bits."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from services.gpu_worker.engine.events import Finished, TokenLogprob
from services.prove.axes import Cell
from services.prove.driver import Record, bits, same_bits
from shared.errors import EngineFault

Gap = Callable[[int, int, int], float | None]
"""(completion index, expected id, id that came) -> gap of the target's logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One thing that was not as in the reference. `position` is absolute: prompt and completion together."""

    cell: Cell | str  #: or what a family's trial tried
    request_id: str
    kind: str
    position: int | None
    expected: str
    got: str
    logit_gap: float | None = None

    def __str__(self) -> str:
        where = "" if self.position is None else f" at position {self.position}"
        gap = "" if self.logit_gap is None else f", logit gap {self.logit_gap:.6g}"
        return f"{self.request_id}: {self.kind}{where}: expected {self.expected}, got {self.got}{gap} [{self.cell}]"


@dataclass(kw_only=True, slots=True)
class Verdict:
    """`compared` counts values by kind (ids, log probabilities, cache rows, state layers)."""

    compared: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        """Take in what another comparison counted and found."""
        self.compared += other.compared
        self.differences += other.differences

    def same(self, what: str, expected: str, got: str, trial: str) -> None:
        """Compare one word of a family's trial."""
        self.compared[what] += 1
        if expected != got:
            self._differs(what, expected, got, trial)

    def require(self, what: str, count: int, least: int, trial: str) -> None:
        """A trial in which something did not happen as often as it must has shown nothing: a difference as well."""
        self.compared[what] += 1
        if count < least:
            self._differs(what, str(least), str(count), trial)

    def _differs(self, what: str, expected: str, got: str, trial: str) -> None:
        self.differences.append(
            Difference(cell=trial, request_id=trial, kind=what, position=None, expected=expected, got=got)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """What is needed to judge one stream, of a cell or of a family's trial."""

    cell: Cell | str
    request_id: str
    prompt_tokens: int
    known: int
    """Tokens of the stream that were journalled before it began."""
    logprobs: bool
    cached_tokens: int
    gap: Gap


def crashed(cell: Cell | str, fault: Exception) -> Verdict:
    """An engine that failed: one difference that says where."""
    if isinstance(fault, EngineFault):
        told = fault.message
    else:
        told = traceback.format_exception_only(fault)[-1].strip()
    frame = traceback.extract_tb(fault.__traceback__)[-1]
    where = f"{told} ({frame.name}, line {frame.lineno})"
    return Verdict(
        differences=[
            Difference(cell=cell, request_id="-", kind="engine", position=None, expected="to run", got=where)
        ]
    )


def judge(exam: Exam, expected: Record, got: Record) -> Verdict:
    """Compare everything that C1 promises."""
    verdict = Verdict()
    blank = Difference(
        cell=exam.cell, request_id=exam.request_id, kind="", position=None, expected="", got=""
    )
    _tokens(exam, expected.tokens[exam.known :], got.tokens, blank, verdict)
    _logprobs(exam, (expected.logprobs or [])[exam.known :], got.logprobs, blank, verdict)
    _value("ending", _ending(expected.finished), _ending(got.finished), blank, verdict)
    _value("cached tokens", exam.cached_tokens, got.cached_tokens, blank, verdict)
    _cache(expected, got, blank, verdict)
    return verdict


def judge_trial(trial: str, expected: Record, got: Record, *, cached_tokens: int, logprobs: bool) -> Verdict:
    """`judge` for one stream of a family's trial, which begins without a journal."""
    exam = Exam(
        cell=trial,
        request_id=trial,
        prompt_tokens=expected.end.prompt_tokens,
        known=0,
        logprobs=logprobs,
        cached_tokens=cached_tokens,
        gap=lambda index, want, have: None,
    )
    return judge(exam, expected, got)


def _tokens(
    exam: Exam, expected: Sequence[int], got: Sequence[int], blank: Difference, verdict: Verdict
) -> None:
    verdict.compared["tokens"] += len(expected)
    index = _first_difference(expected, got)
    if index is None:
        return
    want, have = _at(expected, index), _at(got, index)
    gap = (
        exam.gap(exam.known + index, want, have) if isinstance(want, int) and isinstance(have, int) else None
    )
    verdict.differences.append(
        replace(
            blank,
            kind="tokens",
            position=exam.prompt_tokens + exam.known + index,
            expected=str(want),
            got=str(have),
            logit_gap=gap,
        )
    )


def _logprobs(
    exam: Exam,
    expected: Sequence[TokenLogprob],
    got: Sequence[TokenLogprob] | None,
    blank: Difference,
    verdict: Verdict,
) -> None:
    if not exam.logprobs:
        _value("logprobs", "none", "none" if got is None else "some", blank, verdict)
        return
    verdict.compared["logprobs"] += len(expected)
    index = _first_difference(expected, got or [])
    if index is not None:
        position = exam.prompt_tokens + exam.known + index
        want, have = str(_at(expected, index)), str(_at(got or [], index))
        verdict.differences.append(
            replace(blank, kind="logprobs", position=position, expected=want, got=have)
        )


def _ending(finished: Finished | None) -> str:
    if finished is None:
        return "no end"
    reason = finished.error_code or str(finished.reason)
    return f"{reason}, stop id {finished.stop_id}, {finished.completion_tokens} tokens"


def _value(kind: str, expected: object, got: object, blank: Difference, verdict: Verdict) -> None:
    verdict.compared[kind] += 1
    if expected != got:
        verdict.differences.append(replace(blank, kind=kind, expected=str(expected), got=str(got)))


def _cache(expected: Record, got: Record, blank: Difference, verdict: Verdict) -> None:
    if expected.cache is None or got.cache is None:
        _value("cache", expected.cache is not None, got.cache is not None, blank, verdict)
        return
    one, other = expected.cache, got.cache
    _value("committed tokens", one.committed, other.committed, blank, verdict)
    _rows("kv rows", one.rows, other.rows, blank, verdict)
    for kind in sorted(one.parts.keys() | other.parts.keys()):
        _part(kind, one.parts.get(kind), other.parts.get(kind), blank, verdict)
    if one.draft is not None and other.draft is not None:
        _rows("draft plane", one.draft, other.draft, blank, verdict)
    for kind, want, have in (
        ("recurrent state", one.state, other.state),
        ("conv window", one.window, other.window),
    ):
        if want is None or have is None:
            continue
        verdict.compared[kind] += want.shape[0]
        if not same_bits(want, have):
            verdict.differences.append(
                replace(blank, kind=kind, expected="the same bits", got=_apart(want, have))
            )


def _part(
    kind: str, expected: Tensor | None, got: Tensor | None, blank: Difference, verdict: Verdict
) -> None:
    verdict.compared[kind] += 1
    if expected is None or got is None:
        words = ("there", "missing") if got is None else ("missing", "there")
        verdict.differences.append(replace(blank, kind=kind, expected=words[0], got=words[1]))
    elif not same_bits(expected, got):
        verdict.differences.append(
            replace(blank, kind=kind, expected="the same bits", got=_apart(expected, got))
        )


def _rows(kind: str, expected: Tensor, got: Tensor, blank: Difference, verdict: Verdict) -> None:
    """Cache rows; the last dimension but one counts positions."""
    verdict.compared[kind] += expected.shape[-2]
    if expected.shape != got.shape:
        want, have = f"{expected.shape[-2]} rows", f"{got.shape[-2]} rows"
        verdict.differences.append(replace(blank, kind=kind, expected=want, got=have))
    elif not same_bits(expected, got):
        unlike = (bits(expected) != bits(got)).flatten(0, -3).any(0).any(-1)
        position = int(unlike.nonzero()[0])
        verdict.differences.append(
            replace(blank, kind=kind, position=position, expected="the same bits", got=_apart(expected, got))
        )


def _apart(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f"shape {tuple(other.shape)} for {tuple(one.shape)}"
    return f"up to {float((one - other).abs().max()):.3g} apart"


def _first_difference(expected: Sequence[object], got: Sequence[object]) -> int | None:
    for index in range(max(len(expected), len(got))):
        if _at(expected, index) != _at(got, index):
            return index
    return None


def _at(values: Sequence[object], index: int) -> object:
    return values[index] if index < len(values) else "nothing"
