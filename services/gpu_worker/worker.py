"""The worker's asyncio side: its parts are supervised, events and cancellations find their attempts, claims are kept.

It knows no tokens and no numerics (the engine's), and no SQL and no HTTP (the broker's and the gateway's).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from services.gpu_worker.book import EntryBook
from services.gpu_worker.core import Core
from services.gpu_worker.depth import depths
from services.gpu_worker.engine.events import Captured, Event, Finished
from services.gpu_worker.epochs import Epochs
from services.gpu_worker.evict import Evictor
from services.gpu_worker.neighbours import Neighbours
from services.gpu_worker.publish import Publisher
from services.gpu_worker.pull import Puller
from services.gpu_worker.pulse import Pulse
from services.gpu_worker.reception import Reception
from shared.errors import BurstlineError, ProtocolError
from shared.lifecycle import Drain, Supervisor
from shared.outage import Outage
from shared.protocol import codec, subjects
from shared.protocol.messages import (
    AuditCall,
    AuditReply,
    CancelRequest,
)
from shared.transport.base import Received, Subscription

log = logging.getLogger(__name__)

_AUDIT_PAGE: Final = 2048


class Worker:
    """Belongs to the event loop. `run` supervises its parts: if one ends, the process goes down."""

    def __init__(self, core: Core) -> None:
        settings = core.settings
        self._core = core
        self._book = EntryBook()
        self.evictor = Evictor(core, self._book)
        self.publisher = Publisher(core, self._book, self.evictor)
        self._reception = Reception(core, self.publisher)
        self.room = self._reception.room
        self.begin = self._reception.begin
        self._own = subjects.own_queue(core.identity.fingerprint, core.identity.worker_id)
        self._outage = Outage(log, "extensions of claims", clock=core.clock)
        core.host.deliver_to(self.on_events)
        self.neighbours = Neighbours(
            core.clock,
            model=core.identity.model,
            fingerprint=core.identity.fingerprint,
            vocabulary_size=core.host.engine.dims.vocab,
            grace_s=settings.adopt_after_s,
        )
        self.epochs = Epochs(core, self.evictor, beat=lambda: self.pulse.beat())
        self.pulse = Pulse(core, running=lambda: self.room.taken, after_silence=self.epochs.doubt)

    # ---- supervision -----------------------------------------------------------------------------------------------

    async def run(self, drain: Drain) -> None:
        """Work until `drain` begins; then pull no more, finish within the limit, hand back the rest, and return.
        `own` pulls the worker's own subject.

        Raises:
            TaskDied: a part ended: the engine died or stalled, or whatever its cause says.
        """
        core = self._core
        puller = self._puller()
        bells = await core.transport.subscribe(subjects.bells(core.identity.fingerprint))
        beats = await core.transport.subscribe(subjects.HEARTBEATS)
        cancels = await core.transport.subscribe(subjects.CANCELS.subjects[0])
        worker_id = core.identity.worker_id
        audit = await core.transport.serve(
            subjects.audit(worker_id), worker_id, self.answer_audit, concurrency=1
        )
        try:
            async with Supervisor() as supervisor:
                supervisor.spawn("cancellations", self._listen(cancels))
                supervisor.spawn("claims", self._keep())
                supervisor.spawn("heartbeat", self.pulse.run())
                supervisor.spawn("captures", self.publisher.run())
                supervisor.spawn("eviction", self.evictor.run())
                supervisor.spawn("epoch", self.epochs.run())
                supervisor.spawn("bells", puller.listen(bells))
                supervisor.spawn("neighbours", self.neighbours.run(beats))
                supervisor.spawn("looks", puller.look_around())
                supervisor.spawn("engine", core.host.failed())
                await self._pull(puller, drain)
                await self._reception.settle(core.settings.drain_limit_s)
        finally:
            await self._reception.settle(0.0)
            await bells.close()
            await beats.close()
            await cancels.close()
            await audit.close()

    def _puller(self) -> Puller:
        core = self._core
        return Puller(
            core.transport,
            self.room,
            self.begin,
            fingerprint=core.identity.fingerprint,
            worker_id=core.identity.worker_id,
            ack_wait_s=core.settings.ack_wait_s,
            wait_s=core.settings.pull_wait_s,
            look_s=core.settings.queue_look_s,
            taken=lambda queue: core.metrics.taken.labels(queue).inc(),
            seen=self._seen,
            gone=self.neighbours.gone,
            clock=core.clock,
        )

    def _seen(self, counts: Mapping[str, int]) -> None:
        """A look at the queues: for the gauge, and for those who choose a worker."""
        for queue, depth in depths(counts, self._own).items():
            self._core.metrics.queue_depth.labels(queue).set(depth)
        claimed = sum(attempt.subject.startswith(self._own) for attempt in self._reception.attempts.values())
        own = sum(count for subject, count in counts.items() if subject.startswith(self._own))
        self.pulse.queued = max(0, own - claimed)

    async def _pull(self, puller: Puller, drain: Drain) -> None:
        pulling = asyncio.create_task(puller.run())
        stopping = asyncio.create_task(drain.wait())
        try:
            await asyncio.wait((pulling, stopping), return_when=asyncio.FIRST_COMPLETED)
            self.pulse.draining = drain.begun
            await self.pulse.beat()
            puller.stop()
            await pulling
        finally:
            for task in (pulling, stopping):
                task.cancel()
            await asyncio.gather(pulling, stopping, return_exceptions=True)

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """The engine's events, in order. Those of requests that were given up end here."""
        for event in events:
            attempt = self._reception.by_engine_id.get(event.request_id)
            if attempt is not None:
                attempt.on_event(event)
            elif isinstance(event, Captured):
                self.publisher.offer(event, None)
            elif isinstance(event, Finished):
                log.debug("the engine ended a request that was given up")
        if self._core.host.pressure:
            self.evictor.nudge()

    async def _listen(self, cancels: Subscription) -> None:
        """Live cancellations of all requests; those that are not ours are let pass."""
        async for received in cancels:
            attempt = self._reception.attempts.get(received.subject.rpartition(".")[2])
            if attempt is None:
                continue
            try:
                attempt.cancel(codec.decode_as(CancelRequest, received.data))
            except ProtocolError:
                log.warning("an unreadable cancellation is ignored")
        raise BurstlineError("the subscription to cancellations ended")

    async def answer_audit(self, received: Received) -> bytes:
        """What this worker really holds."""
        who = self._core.identity
        call = codec.decode_as(AuditCall, received.data)
        return codec.encode(
            AuditReply(
                failure=None,
                worker_id=who.worker_id,
                epoch=who.epoch,
                total=len(self._book),
                entries=self._book.page(skip=call.skip, limit=min(call.limit, _AUDIT_PAGE)),
            )
        )

    # ---- what goes on by itself ------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._core.settings.ack_wait_s / 3)
            await self.keep_claims()

    async def keep_claims(self) -> None:
        """One turn: extend the claims of all requests that make progress."""
        fault: str | None = None
        for attempt in list(self._reception.attempts.values()):
            try:
                if not await attempt.keep():
                    log.error(
                        "request %s makes no progress and is left to others", attempt.request.request_id
                    )
                    self._core.metrics.stalls.inc()
            except BurstlineError as error:
                fault = error.code
        if fault is not None:
            self._outage.failed(fault)
        elif self._reception.attempts:
            self._outage.worked()
