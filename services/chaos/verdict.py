"""The whole run judged: every journal and every answer against the undisturbed streams, and who took over when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.chaos.asking import Asked, End, Way
from services.chaos.inject import Record
from services.chaos.journal import Story
from services.chaos.schedule import ACK_WAIT_S, Kind

CLAIMS_LOST: Final = (Kind.WORKER_KILL, Kind.WORKER_STOP, Kind.WORKER_DRAIN)
TAKEOVER_SPARE_S: Final = 1.0
"""Beyond ack_wait, within which another worker claims what a lost one held (C2)."""
TOLD: Final = 20


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
