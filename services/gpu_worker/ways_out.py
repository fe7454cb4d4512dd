"""How an attempt ends: its terminal, its dead letter, and what is given back whatever the way out (C6)."""

from __future__ import annotations

import logging
from typing import Final

from opentelemetry.trace import Span

from services.gpu_worker import spans
from services.gpu_worker.core import Core
from services.gpu_worker.intake import Intake
from services.gpu_worker.item import WorkItem
from services.gpu_worker.lease import HitLease
from services.gpu_worker.publish import Publisher
from services.gpu_worker.relay import Relay
from shared.errors import BurstlineError, Overloaded
from shared.protocol.messages import Failure

log = logging.getLogger(__name__)

_RETRY_DELAY_S: Final = 0.5


def retry_delay_s(deliveries: int, most_s: float) -> float:
    """Seconds until a request that was left is delivered again: doubling with each delivery, at most `most_s`, so that one
    that nobody can begin costs little until the stream's age ends it."""
    return float(min(most_s, _RETRY_DELAY_S * 2 ** min(deliveries - 1, 16)))


class WaysOut:
    """Of one attempt; belongs to its task."""

    def __init__(
        self,
        core: Core,
        publisher: Publisher,
        item: WorkItem,
        intake: Intake,
        lease: HitLease,
        span: Span,
        engine_id: str,
    ) -> None:
        self._core = core
        self._publisher = publisher
        self._item = item
        self._intake = intake
        self._lease = lease
        self._span = span
        self._engine_id = engine_id

    async def end(self, relay: Relay, failure: Failure | None) -> str:
        """The terminal, then the acknowledgement: only what the journal holds is acknowledged."""
        core = self._core
        await self._publisher.settled(self._engine_id, limit_s=core.settings.publish_wait_s)
        terminal = self._intake.outcome.terminal(
            attempt=relay.attempt,
            worker_id=core.identity.worker_id,
            emitted=relay.emitted,
            scored=relay.scored,
            failure=failure,
            at_ns=core.clock.wall_ns(),
        )
        await relay.append(terminal)
        core.metrics.ended(terminal)
        self._span.set_attributes(spans.end(terminal))
        await self._item.acknowledge()
        if terminal.failure is not None:
            return "failed"
        return "done" if terminal.cancel_reason is None else "cancelled"

    async def close(self, way_out: str) -> None:
        """Whatever the way out: nothing stays in the engine, at the broker or in the queue."""
        if self._intake.submitted and not self._intake.outcome.complete:
            self._core.host.cancel(self._engine_id, way_out)
        for step in (self._hand_back(way_out), self._lease.close(submitted=self._intake.submitted)):
            try:
                await step
            except BurstlineError as error:
                log.info(
                    "request %s: what is left goes by expiry (%s)",
                    self._intake.outcome.request.request_id,
                    error.code,
                )

    async def _hand_back(self, way_out: str) -> None:
        if way_out == "handed_back":
            await self._item.hand_back(delay_s=0.0)
        elif way_out == "abandoned":
            most_s = self._core.settings.ack_wait_s
            await self._item.hand_back(delay_s=retry_delay_s(self._item.deliveries, most_s))

    async def bury(self, reason: str) -> None:
        """Dead letters are for people; when their stream is full, the caller gets the answer all the same."""
        name = f"{self._intake.outcome.request.request_id}-dead"
        try:
            await self._item.bury(
                self._core.transport, self._core.identity.fingerprint, name=name, reason=reason
            )
        except Overloaded as error:
            log.error(
                "request %s is not kept as a dead letter: %s", self._intake.outcome.request.request_id, error
            )
