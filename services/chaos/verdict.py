"""The whole run judged: outcomes, takeovers, and the bars of C2, C3 and C6."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.chaos.asking import Asked, End, Way
from services.chaos.inject import Record
from services.chaos.journal import Story
from services.chaos.schedule import ACK_WAIT_S, Kind
from shared.evidence import Bar

CLAIMS_LOST: Final = (Kind.WORKER_KILL, Kind.WORKER_STOP, Kind.WORKER_DRAIN)
UNHEARD: Final = (*CLAIMS_LOST, Kind.GATEWAY_DRAIN, Kind.BROKER_DRAIN)
"""Of these no caller hears anything: a rolling restart of every service is made of them."""
TAKEOVER_SPARE_S: Final = 1.0
"""Beyond ack_wait, within which another worker claims what a lost one held (C2)."""
TOLD: Final = 20
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


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """`second`: a worker that had taken the request over was lost in its turn, before it could claim it."""

    seconds: float
    second: bool = False

    @property
    def late(self) -> bool:
        return self.seconds > ACK_WAIT_S + TAKEOVER_SPARE_S


@dataclass(kw_only=True)
class Verdict:
    """Filled by `judge`."""

    requests: int = 0
    lost: int = 0
    ended_twice: int = 0
    repeated: int = 0
    missing: int = 0
    differing: int = 0
    cut_short: int = 0
    broken_by_kills: int = 0
    """Connections of callers without a key, whose gateway was killed: there is nothing that they could go on with."""
    broken_otherwise: int = 0
    takeovers: list[Takeover] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def complain(self, text: str) -> None:
        """Keep the first few in words."""
        if len(self.complaints) < TOLD:
            self.complaints.append(text)


def judge(
    asked: Sequence[Asked],
    stories: Mapping[str, Story],
    references: Mapping[str, tuple[int, ...]],
    records: Sequence[Record],
    workers: Mapping[str, str],
    gateways: Mapping[str, str],
) -> Verdict:
    """`stories`: of every journal there is, by request; `workers`: worker id -> the name that records use, `gateways`: URL ->
    the same."""
    verdict = Verdict(requests=len(stories))
    owners = {identifier: one for one in asked for identifier in one.request_ids}
    for identifier, story in stories.items():
        one = owners.get(identifier)
        _judge_story(verdict, identifier, story, references.get(one.case.name) if one else None)
        found = takeovers(story, records, workers)
        verdict.takeovers += found
        for late in (one for one in found if one.late):
            verdict.complain(
                f"{identifier} was claimed {late.seconds:.2f} s after a loss; {_claims(story, workers)}"
            )
    for one in asked:
        _judge_answer(verdict, one, references[one.case.name])
        if one.end is End.BROKEN and one.way is not Way.DEADLINE:
            killed = not one.way.keyed and _killed(one, records, gateways.get(one.gateway, ""))
            verdict.broken_by_kills += killed
            verdict.broken_otherwise += not killed
    return verdict


def _killed(one: Asked, records: Sequence[Record], gateway: str) -> bool:
    """Whether its gateway was killed between its asking and the break."""
    return any(
        record.kind is Kind.GATEWAY_KILL
        and record.name == gateway
        and one.began_ns <= record.at_ns <= one.broken_ns
        for record in records
    )


def _judge_story(verdict: Verdict, identifier: str, story: Story, reference: tuple[int, ...] | None) -> None:
    problems = []
    if not story.terminals:
        verdict.lost += 1
        problems.append("no end")
    if len(story.terminals) > 1 or story.after_end:
        verdict.ended_twice += 1
        problems.append(f"{len(story.terminals)} ends, {story.after_end} messages after the first")
    if story.repeated or story.missing or story.miscounted:
        verdict.repeated += story.repeated
        verdict.missing += story.missing + story.miscounted
        problems.append(f"{story.repeated} tokens repeated, {story.missing} missing")
    if reference is not None and (count := story.differs_from(reference)):
        verdict.differing += count
        problems.append(f"{count} tokens differ")
    if problems:
        verdict.complain(f"journal of {identifier}, {len(story.claims)} claims: {'; '.join(problems)}")


def _judge_answer(verdict: Verdict, one: Asked, reference: tuple[int, ...]) -> None:
    """What the caller heard: all of the stream, or a beginning of it."""
    heard = tuple(one.tokens)
    same = sum(a == b for a, b in zip(heard, reference, strict=False))
    name = f"{one.way} {one.case.name} ({one.request_ids[-1] if one.request_ids else 'no id'})"
    if same < len(heard):
        verdict.differing += len(heard) - same
        verdict.complain(f"{name}: {len(heard) - same} of {len(heard)} heard tokens differ")
    elif one.end is End.WHOLE and one.way is not Way.DEADLINE and len(heard) < len(reference):
        verdict.cut_short += 1
        verdict.complain(f"{name}: {len(heard)} of {len(reference)} tokens and an end mark")
    if one.end in (End.FAILED, End.BROKEN, End.GAVE_UP, End.REFUSED) and one.way is not Way.DEADLINE:
        verdict.complain(f"{name}: {one.end}, {one.status} {one.code}, came back {one.returns} times")


def takeovers(story: Story, records: Sequence[Record], workers: Mapping[str, str]) -> list[Takeover]:
    """From what befell a request's worker to the next one's claim.

    Where more deliveries than one lie between two claims, somebody took the request and was lost before it claimed: that
    one's loss is what the claim is counted from.
    """
    found = []
    for before, after in zip(story.claims, story.claims[1:], strict=False):
        name = workers.get(before.worker_id)
        befell = [
            record
            for record in records
            if record.kind in CLAIMS_LOST and before.at_ns <= record.at_ns <= after.at_ns
        ]
        own = [record.at_ns for record in befell if record.name == name]
        if not own:
            continue
        later = [record.at_ns for record in befell if record.name != name and record.at_ns > own[0]]
        second = bool(later) and after.delivery > before.delivery + 1
        since_ns = max(later) if second else own[0]
        found.append(Takeover(seconds=(after.at_ns - since_ns) / 1e9, second=second))
    return found


def _claims(story: Story, workers: Mapping[str, str]) -> str:
    """Who claimed it, when after the first, and at which delivery."""
    first_ns = story.claims[0].at_ns
    return ", ".join(
        f"{workers.get(claim.worker_id, claim.worker_id)} at {(claim.at_ns - first_ns) / 1e9:.2f} s (delivery {claim.delivery})"
        for claim in story.claims
    )


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
    whole = [one for one in judged if one.end is End.WHOLE]
    refused = sum(one.refusals for one in asked)
    failed = sum(one.end is End.FAILED for one in judged)
    told = [
        Bar.at_least("faults", len(records), 1, "faults"),
        Bar.zero("accepted requests without an end", verdict.lost, "requests"),
        Bar.zero("requests that ended twice", verdict.ended_twice, "requests"),
        Bar.zero("repeated tokens", verdict.repeated, "tokens"),
        Bar.zero("missing tokens", verdict.missing, "tokens"),
        Bar.zero("differing tokens", verdict.differing, "tokens"),
        Bar.zero("streams cut short with an end mark", verdict.cut_short, "streams"),
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
            sum(bool(one.request_ids) and one.request_ids[-1] in quiet.cancels for one in whole),
            "requests",
        ),
        Bar.zero("requests left in the queue", quiet.queued, "requests"),
        Bar.zero("audit differences", 0 if quiet.audit_ok else 1, "audits"),
        Bar.zero("pools off their baseline", len(quiet.pools), "workers"),
        Bar.at_most(
            "open files more than at the start",
            max(quiet.files_more.values(), default=0),
            FILES_SPARE,
            "files",
        ),
    ]
    told.append(
        Bar.at_most(
            "tasks more than at the start", max(quiet.tasks_more.values(), default=0), TASKS_SPARE, "tasks"
        )
    )
    told.append(
        Bar.zero(
            "connections broken, but of callers without a key whose gateway was killed",
            verdict.broken_otherwise,
            "connections",
        )
    )
    if kinds <= set(CLAIMS_LOST):
        late = sum(one.late for one in verdict.takeovers)
        told.append(Bar.zero(f"takeovers later than {ACK_WAIT_S + TAKEOVER_SPARE_S:g} s", late, "claims"))
    if kinds <= set(UNHEARD):
        told.append(Bar.zero("failed or refused requests", failed + refused, "requests"))
    return told


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
