"""The engine's own notes on a request: when it came, what was delivered, what to say of it and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from services.gpu_worker.engine.cache.decoded import DecodedState
from services.gpu_worker.engine.cache.entry import Capture
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.events import (
    Burst,
    Captured,
    ChoiceReason,
    DrafterChosen,
    DrafterOff,
    DrafterOffReason,
    Finished,
    Parked,
    Primed,
    PromptScored,
    Share,
    SpecTelemetry,
)
from services.gpu_worker.engine.faults import StreamKey
from services.gpu_worker.engine.requests import DrafterKind, GenerateRequest, ReuseKind
from services.gpu_worker.engine.sessions.auto import AutoSpecSession
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.waiting import Past, Waiting
from shared.errors import Overloaded

MEMORY_RETRIES: Final = 2
"""Times that a stream which alone did not fit into memory is begun again without a new token between (R-S8: < 3)."""


@dataclass(kw_only=True, slots=True)
class Stream:
    """A running request. `emitted` grows by what was delivered, so that it can be begun again at any time."""

    request: GenerateRequest
    session: Session
    prime_ns: int  #: wall time of the admission
    past: Past | None = None
    number: int = 0  #: by first arrival: the largest is the youngest
    aside: bool = False  #: its launch did not fit: the session is lost, the stream is not
    starved: int = 0  #: steps in a row in which it had no room for a row
    in_place: bool = False  #: a hand-off was refused: the session finishes by itself
    emitted: list[int] = field(init=False)  #: journalled before, or delivered
    retries: int = field(init=False)  #: failures alone since it last had a new token
    checkpoint: DecodedState | None = None  #: the newest one (R-Q17)
    blamed: bool = False
    preempted: bool = False
    scored: int = field(init=False)  #: prompt tokens whose log probabilities were told
    told: SpecTelemetry = field(init=False)  #: what earlier bursts reported
    drafter: DrafterKind = "none"  #: the one that it was admitted with, or has by now
    _off: DrafterOffReason | None = None
    _off_told: bool = False

    def __post_init__(self) -> None:
        self.emitted = list(self.request.emitted)
        self.retries = self.past.retries if self.past else 0
        self.scored = self.past.scored if self.past else 0
        self.told = self.past.told if self.past else SpecTelemetry()

    @property
    def key(self) -> StreamKey:
        """What names it."""
        return self.request.key

    @property
    def going(self) -> bool:
        """Whether it may be in the next launch."""
        return self.session.ending is None and not (self.aside or self.preempted)

    @property
    def fed(self) -> int:
        """Tokens that the engine knows of, prompt and delivered ones: what a flushed session must have committed."""
        return len(self.request.tokens) + len(self.emitted)

    @property
    def cached_tokens(self) -> int:
        """The hit of the first admission."""
        return self.past.cached_tokens if self.past else self.session.sequence.cached_prefix_tokens

    @property
    def reuse(self) -> ReuseKind:
        """Whether decode-made rows of another turn are below what it says, now or in an earlier life."""
        earlier = self.past is not None and self.past.reuse == "decode"
        return "decode" if earlier or self.session.sequence.from_decode else "exact"

    @property
    def speculating(self) -> bool:
        """Whether it decodes with a drafter."""
        return self.session.primed and isinstance(self.session, SpecSession) and not self.session.demoted

    @property
    def demotable(self) -> bool:
        """Whether a hand-off to plain decode makes sense now: it drafts, and the journal is behind it."""
        return self.going and not self.in_place and self.speculating and not self.session.completion.replaying

    def chunk_rows(self, most: int) -> int:
        """Rows of a prefill launch: half as many after each retry, at least one tile. No bit depends on it."""
        return max(BLOCK_ROWS, (most >> self.retries) // BLOCK_ROWS * BLOCK_ROWS)

    @property
    def growing(self) -> bool:
        """Whether its blocks do not cover all that it may still say."""
        session = self.session
        wanted = max(session.committed_len, len(self.request.tokens)) + session.completion.budget_left
        return self.going and wanted > session.committed_len + session.sequence.rows_left

    # -- out of memory, or of blocks ------------------------------------------------------------------------------------------

    def set_aside(self, *, alone: bool) -> None:
        """Its launch did not fit; `alone` = nobody else was in it, so that the stream is to blame."""
        self.aside, self.blamed = True, alone

    def give_way(self) -> None:
        """An older stream gets its blocks. Between two bursts: all that was decided is delivered or not yet said."""
        self.preempted = True

    def again(self, now_ns: int) -> Waiting | None:
        """The stream as a queued request whose journal holds all that was delivered. Null: it had its retries, and the
        session ends as Overloaded. Gives everything back either way."""
        self.session.park()
        progress = len(self.emitted) > len(self.request.emitted)
        self.retries = self.blamed + (0 if progress else self.retries)
        if self.retries > MEMORY_RETRIES:
            self.session.fail(Overloaded.code, f"a step did not fit into memory {self.retries} times")
            return None
        past = Past(
            counters=self.session.counters,
            told=self.told,
            retries=self.retries,
            cached_tokens=self.cached_tokens,
            reuse=self.reuse if self.emitted else "exact",
            preempted=(self.past.preempted if self.past else 0) + self.preempted,
            drafter=self.drafter,
            scored=self.scored,
            capture_disabled=self.aside or self.session.capture_disabled,
            checkpoint=self.checkpoint,
        )
        request = replace(self.request, emitted=tuple(self.emitted))
        return Waiting(request=request, since_ns=now_ns, past=past, number=self.number)

    def parked(self, now_ns: int) -> Parked:
        """Say that it was set aside."""
        return Parked(
            request_id=self.request.request_id,
            choice=self.request.choice,
            retries=self.retries,
            emitted=len(self.emitted),
            end_ns=now_ns,
            preempted=self.preempted,
        )

    # -- events -------------------------------------------------------------------------------------------------

    def primed(self, now_ns: int) -> Primed:
        """The prompt is in the cache."""
        return Primed(
            request_id=self.request.request_id,
            choice=self.request.choice,
            tokens=len(self.request.tokens) - self.session.sequence.cached_prefix_tokens,
            chunks=self.session.chunks,
            start_ns=self.prime_ns,
            end_ns=now_ns,
        )

    def prompt_scored(self, now_ns: int) -> PromptScored | None:
        """Log probabilities that were not told yet, by an earlier life neither; null without any."""
        entries = tuple(self.session.sequence.prompt_logprobs[self.scored :])
        if not entries:
            return None
        offset, self.scored = self.scored, self.scored + len(entries)
        return PromptScored(
            request_id=self.request.request_id,
            choice=self.request.choice,
            offset=offset,
            entries=entries,
            end_ns=now_ns,
        )

    def burst(self, start_ns: int, end_ns: int) -> Burst | None:
        """What came since the last burst, null when no token did (its counters then go with the next one)."""
        emissions = self.session.drain()
        if not emissions:
            return None
        now, told = self.session.telemetry(), self.told
        self.told = now
        offset, tokens = len(self.emitted), tuple(emission.token for emission in emissions)
        self.emitted.extend(tokens)
        logprobs = tuple(emission.logprob for emission in emissions if emission.logprob is not None)
        return Burst(
            request_id=self.request.request_id,
            choice=self.request.choice,
            offset=offset,
            tokens=tokens,
            logprobs=logprobs if self.request.top_logprobs is not None else None,
            rounds=now.rounds - told.rounds,
            drafted=now.drafted - told.drafted,
            accepted=now.accepted - told.accepted,
            replayed=now.replayed - told.replayed,
            start_ns=start_ns,
            end_ns=end_ns,
            shares=self._shares(
                now.rounds - told.rounds, now.drafted - told.drafted, now.accepted - told.accepted
            ),
        )

    def _shares(self, rounds: int, drafted: int, accepted: int) -> tuple[Share, ...]:
        """Who drafted what the burst brought."""
        if isinstance(self.session, AutoSpecSession):
            return self.session.drain_shares()
        return (Share(self.drafter, rounds, drafted, accepted),) if self.speculating else ()

    def drafter_off(self, reason: DrafterOffReason) -> None:
        """The engine took the drafter away."""
        self._off = reason

    def drafter_news(self, now_ns: int) -> list[DrafterOff | DrafterChosen]:
        """Say once that the drafter is gone, whoever took it away, and who came in its place."""
        news: list[DrafterOff | DrafterChosen] = []
        session, reason = self.session, self._off
        if isinstance(session, SpecSession):
            if isinstance(session, AutoSpecSession) and session.kind != self.drafter:
                self.drafter = session.kind
                news.append(self.chosen(ChoiceReason.SWITCH, session.rates, now_ns))
            reason = reason or session.off_reason
        if reason is not None and not self._off_told:
            self._off_told = True
            news.append(self._gone(reason, now_ns))
        return news

    def chosen(
        self, reason: ChoiceReason, gains: tuple[tuple[DrafterKind, float], ...], now_ns: int
    ) -> DrafterChosen:
        """Say which drafter the stream has, and why."""
        return DrafterChosen(
            request_id=self.request.request_id,
            choice=self.request.choice,
            drafter=self.drafter,
            reason=reason,
            gains=gains,
            end_ns=now_ns,
        )

    def _gone(self, reason: DrafterOffReason, now_ns: int) -> DrafterOff:
        telemetry = self.session.telemetry()
        tokens = telemetry.rounds + telemetry.accepted
        return DrafterOff(
            request_id=self.request.request_id,
            choice=self.request.choice,
            drafter=self.drafter,
            reason=reason,
            tokens_per_verify=tokens / telemetry.rounds if telemetry.rounds else 0.0,
            end_ns=now_ns,
        )

    def finished(self, now_ns: int) -> Finished:
        """The terminal event; the session must have ended."""
        ending = self.session.ending
        assert ending is not None
        return Finished(
            request_id=self.request.request_id,
            choice=self.request.choice,
            reason=ending.reason,
            error_code=ending.error_code,
            detail=ending.detail,
            prompt_tokens=len(self.request.tokens),
            cached_tokens=self.cached_tokens,
            reuse=self.reuse,
            completion_tokens=len(self.emitted) + (ending.stop_id is not None),
            stop_id=ending.stop_id,
            telemetry=self.session.telemetry(),
            end_ns=now_ns,
        )


def captured(capture: Capture, *, state_bytes: int, block_bytes: int, now_ns: int) -> Captured:
    """A capture that waits for the broker's answer."""
    return Captured(
        capture_id=capture.capture_id,
        request_id=capture.request_id,
        key=capture.entry.key,
        parent_key=capture.parent.key if capture.parent else None,
        splits_key=capture.splits.key if capture.splits else None,
        position=capture.entry.position,
        state_bytes=state_bytes,
        kv_bytes=capture.kv_blocks * block_bytes,
        end_ns=now_ns,
    )
