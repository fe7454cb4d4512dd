"""What is told of a judged run: its figures, and the bars of C2, C3 and C6."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.chaos.asking import Asked, End, Way
from services.chaos.inject import Record
from services.chaos.schedule import ACK_WAIT_S, Kind
from services.chaos.verdict import CLAIMS_LOST, TAKEOVER_SPARE_S, Takeover, Verdict
from shared.evidence import Bar

UNHEARD: Final = (*CLAIMS_LOST, Kind.GATEWAY_DRAIN, Kind.BROKER_DRAIN)
"""Of these no caller hears anything: a rolling restart of every service is made of them."""
FILES_SPARE: Final = 24
"""Open files more than at the start that are no leak: pooled connections that had not been needed."""
TASKS_SPARE: Final = 6
"""Tasks more than at the start that are no leak: a connection that is kept open, a reconnect that is under way."""


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """What the line is like when all is over."""

    queued: int
    cancels: Mapping[str, int]
    """Request -> cancellations of it."""
    audit_ok: bool
    audit_text: str
    files_more: Mapping[str, int]
    tasks_more: Mapping[str, int]
    pools: Mapping[str, str]
    """Worker -> what is not at its baseline; without those that are."""


def outcomes(asked: Sequence[Asked]) -> dict[str, int]:
    """Requests by how they ended, with the typed error."""
    count: Counter[str] = Counter()
    for one in asked:
        failed = one.end not in (End.WHOLE, End.LEFT)
        count[f"{one.way}: {one.end}{f' ({one.code})' if failed and one.code else ''}"] += 1
    return dict(sorted(count.items()))


def takeover_figures(found: Sequence[Takeover]) -> dict[str, float]:
    """Seconds: median, 99th percentile by nearest rank, and most; and how many followed a second loss."""
    ordered = sorted(one.seconds for one in found)
    if not ordered:
        return {"count": 0}
    ranks = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {"count": len(ordered), "after_a_second_loss": sum(one.second for one in found)} | {
        name: round(ordered[math.ceil(share * len(ordered)) - 1], 3) for name, share in ranks.items()
    }


def bars(verdict: Verdict, asked: Sequence[Asked], records: Sequence[Record], quiet: Quiet) -> list[Bar]:
    """What a run promises."""
    kinds = {record.kind for record in records}
    judged = [one for one in asked if one.way is not Way.DEADLINE]
    told = [Bar.at_least("faults", len(records), 1, "faults"), *_streams(verdict)]
    told += _callers(verdict, asked, judged, quiet)
    told += _returns(quiet)
    if kinds <= set(CLAIMS_LOST):
        late = sum(one.late for one in verdict.takeovers)
        told.append(Bar.zero(f"takeovers later than {ACK_WAIT_S + TAKEOVER_SPARE_S:g} s", late, "claims"))
    if kinds <= set(UNHEARD):
        failed = sum(one.end is End.FAILED for one in judged) + sum(one.refusals for one in asked)
        told.append(Bar.zero("failed or refused requests", failed, "requests"))
    return told


def _streams(verdict: Verdict) -> list[Bar]:
    """One stream a request, with one end (C2)."""
    return [
        Bar.zero("accepted requests without an end", verdict.lost, "requests"),
        Bar.zero("requests that ended twice", verdict.ended_twice, "requests"),
        Bar.zero("repeated tokens", verdict.repeated, "tokens"),
        Bar.zero("missing tokens", verdict.missing, "tokens"),
        Bar.zero("differing tokens", verdict.differing, "tokens"),
        Bar.zero("streams cut short with an end mark", verdict.cut_short, "streams"),
    ]


def _callers(verdict: Verdict, asked: Sequence[Asked], judged: Sequence[Asked], quiet: Quiet) -> list[Bar]:
    """What callers were told (C3); `judged` = those of them that set no deadline."""
    stayed = [one.request_ids[-1] for one in judged if one.end is End.WHOLE and one.request_ids]
    return [
        Bar.zero("callers who gave up", sum(one.end is End.GAVE_UP for one in asked), "callers"),
        Bar.zero("refusals without a code or Retry-After", sum(one.untyped for one in asked), "answers"),
        Bar.zero(
            "failures without a code", sum(one.end is End.FAILED and not one.code for one in asked), "answers"
        ),
        Bar.zero(
            "requests cancelled more than once",
            sum(count > 1 for count in quiet.cancels.values()),
            "requests",
        ),
        Bar.zero(
            "requests cancelled though their caller stayed to the end",
            sum(request in quiet.cancels for request in stayed),
            "requests",
        ),
        Bar.zero(
            "connections broken, but of callers without a key whose gateway was killed",
            verdict.broken_otherwise,
            "connections",
        ),
    ]


def _returns(quiet: Quiet) -> list[Bar]:
    """Everything is given back (C6)."""
    files, tasks = (max(more.values(), default=0) for more in (quiet.files_more, quiet.tasks_more))
    return [
        Bar.zero("requests left in the queue", quiet.queued, "requests"),
        Bar.zero("audit differences", 0 if quiet.audit_ok else 1, "audits"),
        Bar.zero("pools off their baseline", len(quiet.pools), "workers"),
        Bar.at_most("open files more than at the start", files, FILES_SPARE, "files"),
        Bar.at_most("tasks more than at the start", tasks, TASKS_SPARE, "tasks"),
    ]


def results(
    verdict: Verdict, asked: Sequence[Asked], records: Sequence[Record], quiet: Quiet
) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "faults": dict(sorted(Counter(str(record.kind) for record in records).items())),
        "asked": len(asked),
        "journalled": verdict.requests,
        "outcomes": outcomes(asked),
        "broken_by_a_killed_gateway_without_a_key": verdict.broken_by_kills,
        "refusals": sum(one.refusals for one in asked),
        "returns": sum(one.returns for one in asked),
        "tokens_heard": sum(len(one.tokens) for one in asked),
        "takeover_s": takeover_figures(verdict.takeovers),
        "cancelled": len(quiet.cancels),
        "open_files_more": dict(quiet.files_more),
        "tasks_more": dict(quiet.tasks_more),
        "pools": dict(quiet.pools),
        "complaints": verdict.complaints,
    }
