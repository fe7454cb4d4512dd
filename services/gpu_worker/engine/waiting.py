"""A request in the line, and what a stream that was set aside takes into its next life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.gpu_worker.engine.cache.decoded import DecodedState
from services.gpu_worker.engine.events import Finished, SpecTelemetry
from services.gpu_worker.engine.requests import DrafterKind, GenerateRequest, ReuseKind
from services.gpu_worker.engine.sessions.outcome import Ending
from services.gpu_worker.engine.sessions.telemetry import SessionCounters

MOST_DOUBLINGS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What a stream that was set aside takes into its next life."""

    counters: SessionCounters
    told: SpecTelemetry
    retries: int
    cached_tokens: int  #: of the first admission (R-Q12)
    reuse: ReuseKind = "exact"  #: what the tokens so far went on from
    preempted: int = 0  #: times that it gave way
    scored: int = 0  #: prompt tokens whose log probabilities were told
    capture_disabled: bool = False  #: a launch of it did not fit (R-S8)
    checkpoint: DecodedState | None = None  #: to come back from, if it is still kept (R-Q17)
    drafter: DrafterKind | None = None  #: that it had


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A queued request."""

    request: GenerateRequest
    since_ns: int  #: monotonic
    past: Past | None = None
    number: int = 0  #: by first arrival: the largest is the youngest

    def rows(self, reserve: int) -> int:
        """Rows to admit it with: prompt, what was said, and a reserve that doubles each time it had to give way, so
        that it asks for its whole budget in the end."""
        request = self.request
        reserve <<= min(self.past.preempted, MOST_DOUBLINGS) if self.past else 0
        return len(request.tokens) + min(request.max_tokens, len(request.emitted) + reserve)

    @property
    def checkpoint(self) -> DecodedState | None:
        """What the stream may come back from."""
        return self.past.checkpoint if self.past else None

    @property
    def telemetry(self) -> SpecTelemetry:
        """What the stream did before it was set aside."""
        return self.past.counters.read() if self.past else SpecTelemetry()

    def refused(self, ending: Ending, now_ns: int) -> Finished:
        """The terminal event of a request that does not run."""
        return Finished(
            request_id=self.request.request_id,
            choice=self.request.choice,
            reason=ending.reason,
            error_code=ending.error_code,
            detail=ending.detail,
            prompt_tokens=len(self.request.tokens),
            cached_tokens=self.past.cached_tokens if self.past else 0,
            reuse=self.past.reuse if self.past else "exact",
            completion_tokens=len(self.request.emitted),
            stop_id=None,
            telemetry=self.telemetry,
            end_ns=now_ns,
        )
