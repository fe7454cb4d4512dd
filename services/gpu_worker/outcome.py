"""The terminal frame of an attempt, from the engine's last events and the cancellations. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import UNSET

from services.gpu_worker.engine.events import Admitted, Finished, Primed
from services.gpu_worker.engine.events import FinishReason as Reason
from services.gpu_worker.engine.events import SpecTelemetry as EngineTelemetry
from shared.errors import EngineFault, Overloaded
from shared.protocol.messages import (
    CancelRequest,
    ChoiceEnd,
    Failure,
    FinishReason,
    GenerateRequest,
    SpecTelemetry,
    Terminal,
)

_FINISH: dict[Reason, FinishReason] = {
    Reason.STOP: "stop",
    Reason.LENGTH: "length",
    Reason.CANCELLED: "cancelled",
    Reason.ERROR: "error",
}

_RETRY_AFTER_S: Final = 2
"""After a request that did not fit into memory."""


@dataclass(kw_only=True)
class Timeline:
    """When the phases of the first choice were over (nanoseconds since the epoch; 0 = not reached)."""

    created_ns: int
    admitted_ns: int = 0
    primed_start_ns: int = 0
    primed_ns: int = 0
    finished_ns: int = 0

    def admitted(self, event: Admitted) -> None:
        self.admitted_ns = self.admitted_ns or event.end_ns - event.restore_ns

    def primed(self, event: Primed) -> None:
        self.primed_start_ns = self.primed_start_ns or event.start_ns
        self.primed_ns = self.primed_ns or event.end_ns

    def finished(self, event: Finished) -> None:
        self.finished_ns = max(self.finished_ns, event.end_ns)

    @property
    def queue_ns(self) -> int:
        """From the gateway's publish to the first work on it."""
        return max(0, self.admitted_ns - self.created_ns) if self.admitted_ns else 0

    @property
    def prime_ns(self) -> int:
        return self.primed_ns - self.primed_start_ns

    @property
    def decode_ns(self) -> int:
        return max(0, self.finished_ns - self.primed_ns) if self.primed_ns else 0


@dataclass(kw_only=True)
class Outcome:
    """What is known of an attempt's end so far."""

    request: GenerateRequest
    prompt_tokens: int
    timeline: Timeline
    cache_decision: str
    forced: bool = False
    """It goes on after tokens that other numerics decided."""
    finished: dict[int, Finished] = field(default_factory=dict)
    cuts: dict[int, CancelRequest] = field(default_factory=dict)
    """The cancellation of each choice, the first one of each counts."""

    def cancel(self, message: CancelRequest) -> bool:
        """Note a cancellation. True when it ends a choice that was neither cancelled nor over."""
        before = self.open
        targets = range(self.request.choices) if message.choice is None else (message.choice,)
        for choice in targets:
            if choice in range(self.request.choices):
                self.cuts.setdefault(choice, message)
        return self.open != before

    @property
    def open(self) -> frozenset[int]:
        """Choices that are neither over nor cancelled."""
        return frozenset(range(self.request.choices)) - self.finished.keys() - self.cuts.keys()

    @property
    def complete(self) -> bool:
        """Whether the engine told the end of every choice."""
        return len(self.finished) == self.request.choices

    def terminal(
        self,
        *,
        attempt: int,
        worker_id: str,
        emitted: Sequence[int],
        scored: int,
        failure: Failure | None,
        at_ns: int,
    ) -> Terminal:
        """The one terminal frame. `emitted` = tokens of each choice in the journal, `scored` of the prompt."""
        ends = tuple(
            _end(choice, self.finished.get(choice), self.cuts.get(choice), emitted[choice])
            for choice in range(self.request.choices)
        )
        decoded = any(event.reuse == "decode" for event in self.finished.values())
        cached = max((event.cached_tokens for event in self.finished.values()), default=0)
        return Terminal(
            request_id=self.request.request_id,
            tenant=self.request.tenant,
            key_id=self.request.key_id,
            model=self.request.model,
            attempt=attempt,
            worker_id=worker_id,
            ends=ends,
            failure=failure or _failure(self.finished),
            cancel_reason=_reason(self.cuts),
            prompt_tokens=self.prompt_tokens,
            scored_tokens=scored,
            cached_tokens=cached,
            completion_tokens=sum(end.completion_tokens for end in ends),
            cache_decision="decode" if decoded else self.cache_decision,
            reuse="decode" if decoded else "prefill",
            # A later attempt lets the journal stand where the rows that it went on from may be gone.
            exact=not self.forced
            and not decoded
            and not (self.request.cache.reuse == "decode" and attempt > 1),
            queue_ns=self.timeline.queue_ns,
            prime_ns=self.timeline.prime_ns,
            decode_ns=self.timeline.decode_ns,
            at_ns=at_ns,
        )


def _end(choice: int, event: Finished | None, cut: CancelRequest | None, emitted: int) -> ChoiceEnd:
    """A stop string that the reader found ends the choice as `stop`, with usage at the token where it was found."""
    finish: FinishReason = "cancelled" if event is None else _FINISH[event.reason]
    tokens = emitted if event is None else event.completion_tokens
    stop_id = None if event is None else event.stop_id
    if event is None and cut is None:
        finish = "error"
    if cut is not None and finish != "error":
        if cut.reason == "stop_string":
            finish, stop_id = "stop", None
            tokens = tokens if cut.offset is None else min(cut.offset, tokens)
        elif cut.choice is not None:
            finish, stop_id, tokens = "cancelled", None, emitted  # it may have ended before it heard of it
    return ChoiceEnd(
        choice=choice,
        finish=finish,
        completion_tokens=tokens,
        emitted_tokens=emitted,
        stop_id=stop_id,
        spec=_spec(event.telemetry if event else EngineTelemetry()),
    )


def _spec(telemetry: EngineTelemetry) -> SpecTelemetry:
    return SpecTelemetry(
        rounds=telemetry.rounds,
        drafted=telemetry.drafted,
        accepted=telemetry.accepted,
        replayed=telemetry.replayed or UNSET,
    )


def _failure(finished: Mapping[int, Finished]) -> Failure | None:
    for event in finished.values():
        if event.reason is Reason.ERROR:
            overloaded = event.error_code == Overloaded.code
            return Failure(
                code=event.error_code or EngineFault.code,
                message=event.detail or "the engine could not go on with this request",
                status=Overloaded.status if overloaded else EngineFault.status,
                retry_after_s=_RETRY_AFTER_S if overloaded else None,
            )
    return None


def _reason(cuts: Mapping[int, CancelRequest]) -> str | None:
    return next((cut.reason for cut in cuts.values()), None)
