"""What the engine and the callers tell of one attempt: tokens, ends, cancellations. No awaits, no messages.

The attempt's task reads it: `buffer` holds tokens that no frame carries yet, `outcome` what the terminal will say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry.trace import Span

from services.gpu_worker import spans
from services.gpu_worker.convert import logprobs_of
from services.gpu_worker.core import Core
from services.gpu_worker.engine.events import (
    Admitted,
    Burst,
    Captured,
    DrafterChosen,
    DrafterOff,
    DrafterOffReason,
    Event,
    Finished,
    FinishReason,
    HitDropped,
    Parked,
    Primed,
    PromptScored,
)
from services.gpu_worker.frames import FrameBuffer
from services.gpu_worker.outcome import Outcome, Timeline
from shared.errors import EngineFault
from shared.protocol.messages import CancelRequest, GenerateRequest

log = logging.getLogger(__name__)

_WHOLE: Final = (FinishReason.STOP, FinishReason.LENGTH)


class Intake:
    """Belongs to the event loop; its methods are called between the awaits of the attempt's task."""

    def __init__(
        self,
        core: Core,
        request: GenerateRequest,
        engine_id: str,
        *,
        span: Span,
        on_capture: Callable[[Captured], None],
        on_restored: Callable[[], None],
    ) -> None:
        """`on_restored` is called when the hit is restored or given up: its lease may go."""
        self._core = core
        self._engine_id = engine_id
        self._span = span
        self._on_capture = on_capture
        self._on_restored = on_restored
        self._wake = asyncio.Event()
        self._progress_ns = core.clock.monotonic_ns()
        self._decoding = False
        self._untraced: list[Event] = []
        self.submitted = False
        self.over = asyncio.Event()
        """Set when the engine told the end of every choice."""
        self.fault: EngineFault | None = None
        self.buffer = FrameBuffer((0,) * request.choices)
        self.outcome = Outcome(
            request=request,
            prompt_tokens=len(request.prompt) // 4,
            timeline=Timeline(created_ns=request.created_ns),
            cache_decision="bypass",
        )

    async def wait(self) -> None:
        """Until something was told since the last look."""
        self.trace()
        self._wake.clear()
        await self._wake.wait()

    def cancel(self, message: CancelRequest) -> None:
        """Note a cancellation; what it ends the engine ends within one chunk or one round."""
        if self.outcome.cancel(message) and self.submitted:
            self._core.host.cancel(self._engine_id, message.reason, message.choice)

    def on_event(self, event: Event) -> None:
        """One event of the engine for this attempt."""
        self._progress_ns = self._core.clock.monotonic_ns()
        self._untraced.append(event)
        match event:
            case Admitted():
                self.outcome.timeline.admitted(event)
                self._on_restored()
            case HitDropped():
                self.outcome.cache_decision = "hit_dropped"
                self._on_restored()
            case Primed():
                self.outcome.timeline.primed(event)
                self._decoding = True
            case PromptScored():
                self._scored(event)
            case Burst():
                self._burst(event)
            case Captured():
                self._on_capture(event)
            case DrafterChosen() | DrafterOff():
                self._drafter_changed(event)
            case Parked():
                self._core.metrics.parked.inc()
                self._decoding = False
            case Finished():
                self._finished(event)
        self._wake.set()

    def trace(self) -> None:
        """Tell the spans and figures of what came since the last time: when the tokens that came are on their way."""
        events, self._untraced = self._untraced, []
        metrics = self._core.metrics
        for event in events:
            if isinstance(event, Burst):
                metrics.tokens.inc(len(event.tokens))
                metrics.drafts.verified(event)
            spans.record(self._core.telemetry, self._span, event)

    def alive(self, limit_s: float) -> bool:
        """Whether it made progress within the limit. Before its first token and after its last the engine's own
        progress counts: it may wait for others, be in a long prime, or be over but for its last messages."""
        if not self._decoding or self.over.is_set():
            return self._core.host.quiet_s() < limit_s
        return (self._core.clock.monotonic_ns() - self._progress_ns) / 1e9 < limit_s

    def _burst(self, event: Burst) -> None:
        if self.fault is not None or event.choice in self.outcome.cuts:
            return  # nobody reads a cancelled choice; its usage is told by the engine's end
        logprobs = None if event.logprobs is None else logprobs_of(event.logprobs)
        with self._fault_of_the_engine():
            self.buffer.add(event.choice, event.offset, event.tokens, logprobs)

    def _scored(self, event: PromptScored) -> None:
        if self.fault is None:
            with self._fault_of_the_engine():
                self.buffer.score(event.offset, logprobs_of(event.entries))

    @contextmanager
    def _fault_of_the_engine(self) -> Iterator[None]:
        """What it told does not follow what it told before: the request ends."""
        try:
            yield
        except EngineFault as fault:
            self.fault = fault
            self._core.host.cancel(self._engine_id, "fault")

    def _drafter_changed(self, event: DrafterChosen | DrafterOff) -> None:
        """Counted and traced whatever the reason; a useless drafter is worth a line (FR-22)."""
        if isinstance(event, DrafterChosen):
            self._core.metrics.drafts.chosen.labels(event.drafter, event.reason).inc()
            return
        self._core.metrics.drafts.off.labels(event.drafter, event.reason).inc()
        if event.reason is DrafterOffReason.ACCEPTANCE:
            log.warning(
                "drafter %s is off for a choice of request %s: %.2f tokens a verify",
                event.drafter,
                self.outcome.request.request_id,
                event.tokens_per_verify,
            )

    def _finished(self, event: Finished) -> None:
        self.outcome.finished[event.choice] = event
        self._core.metrics.drafts.spent(event.telemetry)
        self.outcome.timeline.finished(event)
        if event.choice == 0 and not self.buffer.prompt_over() and event.reason in _WHOLE:
            self.fault = EngineFault("the prompt was not scored to its end")
        if self.outcome.complete:
            self.over.set()
