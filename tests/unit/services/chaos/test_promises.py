"""What a run promises depends on what was done: of a rolling restart no caller hears anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.chaos.asking import Asked, End, Way
from services.chaos.cases import cases
from services.chaos.inject import Record
from services.chaos.promises import Quiet, bars
from services.chaos.schedule import Kind
from services.chaos.verdict import Takeover, Verdict
from shared.evidence import Bar

QUIET = Quiet(queued=0, cancels={}, audit_ok=True, audit_text="", files_more={}, tasks_more={}, pools={})
ROLLING = (Kind.WORKER_DRAIN, Kind.GATEWAY_DRAIN, Kind.BROKER_DRAIN)
FAILED = "failed or refused requests"


def told(kinds: tuple[Kind, ...], *asked: Asked, verdict: Verdict | None = None) -> dict[str, Bar]:
    records = [Record(kind=kind, name="x", at_ns=0) for kind in kinds]
    return {bar.name: bar for bar in bars(verdict or Verdict(), asked, records, QUIET)}


def one(**fields: object) -> Asked:
    return Asked(case=cases(1)[0], way=Way.STREAM, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", [ROLLING, (Kind.WORKER_KILL,), (Kind.WORKER_STOP, Kind.GATEWAY_DRAIN)])
def test_no_caller_hears_of_a_rolling_restart_or_a_lost_worker(kinds: tuple[Kind, ...]) -> None:
    assert told(kinds, one(end=End.WHOLE))[FAILED].holds
    assert not told(kinds, one(end=End.FAILED, code="internal_error"))[FAILED].holds
    assert not told(kinds, one(end=End.WHOLE, refusals=1))[FAILED].holds


@pytest.mark.parametrize("kind", [Kind.QUEUE_FULL, Kind.NATS_RESTART, Kind.POSTGRES_RESTART])
def test_where_something_is_away_refusals_are_answers(kind: Kind) -> None:
    assert FAILED not in told((Kind.WORKER_KILL, kind), one(end=End.REFUSED, refusals=1))


def test_a_late_takeover_fails_where_nothing_but_workers_was_lost() -> None:
    late = Verdict(takeovers=[Takeover(seconds=5.2)])
    assert not told((Kind.WORKER_KILL,), verdict=late)["takeovers later than 5 s"].holds
    assert told((Kind.WORKER_KILL,), verdict=Verdict(takeovers=[Takeover(seconds=4.9)]))[
        "takeovers later than 5 s"
    ].holds


def test_a_broken_connection_is_told_unless_its_gateway_was_killed() -> None:
    (name,) = (name for name in told(ROLLING) if name.startswith("connections broken"))
    assert not told(ROLLING, verdict=Verdict(broken_otherwise=1))[name].holds
    assert told(ROLLING, verdict=Verdict(broken_by_kills=1))[name].holds


@pytest.mark.parametrize(
    "quiet",
    [
        {"queued": 1},
        {"cancels": {"r": 2}},
        {"audit_ok": False},
        {"pools": {"w": "1 running"}},
        {"tasks_more": {"w": 7}},
    ],
)
def test_what_is_left_when_all_is_quiet_fails_the_run(quiet: dict[str, object]) -> None:
    found = bars(Verdict(), [], [Record(kind=Kind.WORKER_KILL, name="x", at_ns=0)], replace(QUIET, **quiet))  # type: ignore[arg-type]
    assert [bar.holds for bar in found].count(False) == 1
