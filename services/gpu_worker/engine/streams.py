"""The engine's own notes on a request: when it came, what was delivered, what to say when it ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.gpu_worker.engine.requests import Burst, Finished, GenerateRequest, SpecTelemetry
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.outcome import Ending


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A queued request."""

    request: GenerateRequest
    since_ns: int  #: monotonic

    def refused(self, ending: Ending, now_ns: int) -> Finished:
        """The terminal event of a request that never ran."""
        return Finished(
            request_id=self.request.request_id,
            choice=self.request.choice,
            reason=ending.reason,
            error_code=ending.error_code,
            detail=ending.detail,
            prompt_tokens=len(self.request.tokens),
            cached_tokens=0,
            completion_tokens=len(self.request.emitted),
            stop_id=None,
            telemetry=SpecTelemetry(),
            end_ns=now_ns,
        )


@dataclass(kw_only=True, slots=True)
class Stream:
    """A running request."""

    request: GenerateRequest
    session: Session
    offset: int  #: completion index of the next token to deliver
    prime_ns: int  #: wall time of the admission
    told: SpecTelemetry = field(default_factory=SpecTelemetry)  #: what earlier bursts reported

    def burst(self, start_ns: int, end_ns: int) -> Burst | None:
        """What came since the last burst, null when no token did (its counters then go with the next one)."""
        emissions = self.session.drain()
        if not emissions:
            return None
        now, told = self.session.telemetry(), self.told
        self.told = now
        first, self.offset = self.offset, self.offset + len(emissions)
        logprobs = tuple(emission.logprob for emission in emissions if emission.logprob is not None)
        return Burst(
            request_id=self.request.request_id,
            choice=self.request.choice,
            offset=first,
            tokens=tuple(emission.token for emission in emissions),
            logprobs=logprobs if self.request.top_logprobs is not None else None,
            rounds=now.rounds - told.rounds,
            drafted=now.drafted - told.drafted,
            accepted=now.accepted - told.accepted,
            start_ns=start_ns,
            end_ns=end_ns,
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
            cached_tokens=self.session.sequence.cached_prefix_tokens,
            completion_tokens=max(self.session.completion_tokens, len(self.request.emitted)),
            stop_id=ending.stop_id,
            telemetry=self.session.telemetry(),
            end_ns=now_ns,
        )


class Counters:
    """Totals over the engine's life; streams that ended are added, running ones read on demand."""

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self._ended = SpecTelemetry()

    def add(self, telemetry: SpecTelemetry) -> None:
        """Count a stream that ended."""
        self._ended = _sum((self._ended, telemetry))

    def with_live(self, running: Iterable[SpecTelemetry]) -> SpecTelemetry:
        """Ended and running streams together."""
        return _sum((self._ended, *running))


def _sum(parts: Iterable[SpecTelemetry]) -> SpecTelemetry:
    parts = list(parts)
    return SpecTelemetry(
        rounds=sum(part.rounds for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        capture_failures=sum(part.capture_failures for part in parts),
    )
