"""What is read from a journal, and how a run is judged by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.chaos import promises
from services.chaos import verdict as judging
from services.chaos.asking import Asked, End, Way
from services.chaos.cases import Case
from services.chaos.inject import Record
from services.chaos.journal import Story, story
from services.chaos.schedule import Kind
from shared.protocol.messages import (
    ChoiceEnd,
    Frame,
    SpecTelemetry,
    Started,
    StreamMessage,
    Terminal,
    pack_tokens,
)

REQUEST = "ab" * 16
CASE = Case(name="greedy-0", prompt=(300, 301), max_tokens=4, temperature=0.0, seed=0)
REFERENCE = {"greedy-0": (5, 6, 7, 8)}
QUIET = promises.Quiet(
    queued=0, cancels={}, audit_ok=True, audit_text="", files_more={}, tasks_more={}, pools={}
)
SECOND = 1_000_000_000


def _started(attempt: int, worker: str, at_ns: int, have: int = 0) -> Started:
    return Started(
        request_id=REQUEST, attempt=attempt, worker_id=worker, fingerprint="f" * 64, cached_tokens=0,
        resumed_offsets=(have,), resumed_scores=0, at_ns=at_ns,
    )  # fmt: skip


def _frame(offset: int, *tokens: int, attempt: int = 1) -> Frame:
    return Frame(
        request_id=REQUEST,
        attempt=attempt,
        choice=0,
        offset=offset,
        tokens=pack_tokens(tokens),
        logprobs=None,
    )


def _terminal(emitted: int = 4) -> Terminal:
    end = ChoiceEnd(
        choice=0, finish="length", completion_tokens=emitted, emitted_tokens=emitted, stop_id=None,
        spec=SpecTelemetry(rounds=1, drafted=0, accepted=0),
    )  # fmt: skip
    return Terminal(
        request_id=REQUEST, tenant="t", key_id="k", model="m", attempt=1, worker_id="w", ends=(end,), failure=None,
        cancel_reason=None, prompt_tokens=2, scored_tokens=0, cached_tokens=0, completion_tokens=emitted,
        cache_decision="miss", reuse="prefill", exact=True, queue_ns=0, prime_ns=0, decode_ns=0, at_ns=0,
    )  # fmt: skip


GOOD: tuple[StreamMessage, ...] = (
    _started(1, "w-1", 1 * SECOND),
    _frame(0, 5, 6),
    _started(2, "w-2", 6 * SECOND, have=2),
    _frame(2, 7, 8, attempt=2),
    _terminal(),
)


def _judge(told: Story, asked: Asked | None = None) -> judging.Verdict:
    one = asked or Asked(case=CASE, way=Way.STREAM, end=End.WHOLE, request_ids=[REQUEST], tokens=[5, 6, 7, 8])
    return judging.judge([one], {REQUEST: told}, REFERENCE, [], {}, {})


def test_c2_a_good_journal_has_nothing_to_complain_of() -> None:
    verdict = _judge(story(GOOD))
    assert not verdict.complaints
    assert all(bar.holds for bar in promises.bars(verdict, [], [_record(2)], QUIET))


@pytest.mark.parametrize(
    ("journal", "bar"),
    [
        (GOOD[:-1], "accepted requests without an end"),
        ((*GOOD, _terminal()), "requests that ended twice"),
        ((*GOOD, _frame(4, 9)), "requests that ended twice"),
        ((GOOD[0], _frame(0, 5, 6), _frame(1, 6, 7, 8), _terminal(5)), "repeated tokens"),
        ((GOOD[0], _frame(0, 5, 6), _frame(3, 8), _terminal(3)), "missing tokens"),
        ((GOOD[0], _frame(0, 5, 6), _terminal()), "missing tokens"),
        ((GOOD[0], _frame(0, 5, 6, 7, 9), _terminal()), "differing tokens"),
    ],
)
def test_c2_every_way_to_break_the_promise_breaks_its_bar(
    journal: tuple[StreamMessage, ...], bar: str
) -> None:
    verdict = _judge(story(journal))
    assert verdict.complaints
    assert bar in {one.name for one in promises.bars(verdict, [], [_record(2)], QUIET) if not one.holds}


@pytest.mark.parametrize(
    ("tokens", "bar"),
    [([5, 6, 7, 9], "differing tokens"), ([5, 6, 7], "streams cut short with an end mark")],
)
def test_c2_what_the_caller_heard_is_judged_too(tokens: list[int], bar: str) -> None:
    asked = Asked(case=CASE, way=Way.STREAM, end=End.WHOLE, request_ids=[REQUEST], tokens=tokens)
    verdict = _judge(story(GOOD), asked)
    assert bar in {one.name for one in promises.bars(verdict, [asked], [_record(2)], QUIET) if not one.holds}


@pytest.mark.parametrize(
    "quiet",
    [
        replace(QUIET, queued=1),
        replace(QUIET, audit_ok=False),
        replace(QUIET, pools={"w": "silent"}),
        replace(QUIET, files_more={"worker": 1000}),
        replace(QUIET, tasks_more={"gateway": 1000}),
    ],
)
def test_c6_what_does_not_return_breaks_a_bar(quiet: promises.Quiet) -> None:
    assert not all(bar.holds for bar in promises.bars(judging.Verdict(), [], [_record(2)], quiet))


@pytest.mark.parametrize(
    ("way", "gateway", "killed_at", "promised"),
    [
        (Way.STREAM, "http://a", 3, True),
        (Way.WHOLE, "http://a", 3, True),
        (Way.STREAM, "http://b", 3, False),
        (Way.STREAM, "http://a", 1, False),
        (Way.STREAM, "http://a", 9, False),
        (Way.KEYED_STREAM, "http://a", 3, False),
    ],
)
def test_only_a_caller_without_a_key_may_lose_its_connection_and_only_to_a_kill_of_its_gateway(
    way: Way, gateway: str, killed_at: int, promised: bool
) -> None:
    asked = Asked(
        case=CASE, way=way, end=End.BROKEN, request_ids=[REQUEST], tokens=[5], gateway=gateway,
        began_ns=2 * SECOND, broken_ns=4 * SECOND,
    )  # fmt: skip
    kill = Record(kind=Kind.GATEWAY_KILL, name="gateway", at_ns=killed_at * SECOND)
    verdict = judging.judge(
        [asked],
        {REQUEST: story(GOOD)},
        REFERENCE,
        [kill],
        {},
        {"http://a": "gateway", "http://b": "gateway-2"},
    )
    assert (verdict.broken_by_kills, verdict.broken_otherwise) == ((1, 0) if promised else (0, 1))
    assert all(bar.holds for bar in promises.bars(verdict, [asked], [kill], QUIET)) is promised


@pytest.mark.parametrize(
    ("cancels", "kept"), [({"other": 1}, True), ({"other": 2}, False), ({REQUEST: 1}, False)]
)
def test_who_stays_is_not_cancelled_and_nobody_twice(cancels: dict[str, int], kept: bool) -> None:
    asked = Asked(case=CASE, way=Way.STREAM, end=End.WHOLE, request_ids=[REQUEST], tokens=[5, 6, 7, 8])
    bars = promises.bars(_judge(story(GOOD), asked), [asked], [_record(2)], replace(QUIET, cancels=cancels))
    assert all(bar.holds for bar in bars) is kept


def test_a_run_without_a_fault_shows_nothing() -> None:
    assert not all(bar.holds for bar in promises.bars(judging.Verdict(), [], [], QUIET))


def test_a_takeover_is_timed_from_the_fault_to_the_next_claim() -> None:
    workers = {"w-1": "worker", "w-2": "worker-2"}
    records = [_record(2), Record(kind=Kind.NATS_CUT, name="nats", at_ns=3 * SECOND)]
    assert judging.takeovers(story(GOOD), records, workers) == [judging.Takeover(seconds=4.0)]
    assert judging.takeovers(story(GOOD), [_record(9)], workers) == []


@pytest.mark.parametrize(("delivery", "seconds"), [(2, 4.0), (3, 1.0)])
def test_a_second_loss_before_the_claim_is_what_it_is_counted_from(delivery: int, seconds: float) -> None:
    """Deliveries tell: the third worker's claim answers the third one where the second died before it could claim."""
    workers = {"w-1": "worker", "w-2": "worker-2", "w-3": "worker-3"}
    records = [_record(2), replace(_record(5), name="worker-3")]
    (found,) = judging.takeovers(story(GOOD, (1, delivery)), records, workers)
    assert (found.seconds, found.second) == (seconds, delivery == 3)


def test_c2_a_late_takeover_breaks_its_bar() -> None:
    late = judging.Verdict(takeovers=[judging.Takeover(seconds=5.1)])
    assert [bar.name for bar in promises.bars(late, [], [_record(2)], QUIET) if not bar.holds] == [
        "takeovers later than 5 s"
    ]


def _record(at_s: int) -> Record:
    return Record(kind=Kind.WORKER_KILL, name="worker", at_ns=at_s * SECOND)
