"""The worker's asyncio side: deliveries become attempts, events and cancellations find theirs, claims are kept.

It knows no tokens and no numerics (the engine's), and no SQL and no HTTP (the broker's and the gateway's).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final

import msgspec

from services.gpu_worker.attempt import Attempt
from services.gpu_worker.book import EntryBook
from services.gpu_worker.core import Core
from services.gpu_worker.depth import depths
from services.gpu_worker.engine.events import Captured, Event, Finished
from services.gpu_worker.epochs import Epochs
from services.gpu_worker.evict import Evictor
from services.gpu_worker.item import WorkItem
from services.gpu_worker.neighbours import Neighbours
from services.gpu_worker.publish import Publisher
from services.gpu_worker.pull import Puller, Room
from services.gpu_worker.pulse import Pulse
from shared.errors import BurstlineError, NotFound, ProtocolError
from shared.lifecycle import Drain, Supervisor
from shared.outage import Outage
from shared.protocol import codec, subjects
from shared.protocol.messages import (
    AuditCall,
    AuditReply,
    CancelRequest,
    ClaimCheck,
    GenerateRequest,
    Message,
)
from shared.transport import bodies
from shared.transport.base import Delivery, PullConsumer, Received, Subscription
from shared.transport.wire import matches

log = logging.getLogger(__name__)

_AUDIT_PAGE: Final = 2048
_PASS_ON_S: Final = 2.0


class Worker:
    """Belongs to the event loop. `run` supervises its parts: if one ends, the process goes down."""

    def __init__(self, core: Core) -> None:
        settings = core.settings
        self._core = core
        self._book = EntryBook()
        self.evictor = Evictor(core, self._book)
        self.publisher = Publisher(core, self._book, self.evictor)
        self.room = Room(settings.max_running)
        self._attempts: dict[str, Attempt] = {}
        self._by_engine_id: dict[str, Attempt] = {}
        self._tasks: dict[asyncio.Task[str], Attempt | None] = {}
        self._numbers = itertools.count(1)
        self._busy = asyncio.Event()
        self._own = subjects.request_to(core.identity.fingerprint, core.identity.worker_id)
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

    async def run(self, own: PullConsumer, drain: Drain) -> None:
        """Work until `drain` begins; then pull no more, finish within the limit, hand back the rest, and return.
        `own` pulls the worker's own subject.

        Raises:
            TaskDied: a part ended: the engine died or stalled, or whatever its cause says.
        """
        core = self._core
        puller = self._puller(own)
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
                await self._settle(core.settings.drain_limit_s)
        finally:
            await self._settle(0.0)
            await bells.close()
            await beats.close()
            await cancels.close()
            await audit.close()

    def _puller(self, own: PullConsumer) -> Puller:
        core = self._core
        return Puller(
            core.transport,
            own,
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
        )

    def _seen(self, counts: Mapping[str, int]) -> None:
        """A look at the queues: for the gauge, and for those who choose a worker."""
        for queue, depth in depths(counts, self._own).items():
            self._core.metrics.queue_depth.labels(queue).set(depth)
        claimed = sum(attempt.subject == self._own for attempt in self._attempts.values())
        self.pulse.queued = max(0, counts.get(self._own, 0) - claimed)

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

    async def _settle(self, limit_s: float) -> None:
        """Give the attempts `limit_s` to end; the rest is handed back to the queue."""
        if self._tasks and limit_s:
            await asyncio.wait(self._tasks, timeout=limit_s)
        if self._tasks:
            log.warning("%d requests are handed back", len(self._tasks))
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    # ---- deliveries ------------------------------------------------------------------------------------------------

    def begin(self, delivery: Delivery) -> None:
        """Start the attempt of a delivery, which holds a place in the room."""
        try:
            work = codec.decode(delivery.message.data)
            request = _request_of(work)
            subjects.tokens(request.request_id)  # an id that is no subject token could reach other subjects
        except ProtocolError as error:
            log.warning("a work item cannot be read and is kept as a dead letter: %s", error.code)
            self._spawn(self._bury(delivery), None)
            return
        active = self._attempts.get(request.request_id)
        if active is not None:
            active.adopt(delivery)
            self.room.give_back()
        elif self._is_foreign(delivery) and request.model != self._core.identity.model:
            self._spawn(self._pass_on(delivery), None)
        elif isinstance(work, ClaimCheck):
            self._spawn(self._redeemed(work, delivery), None)
        else:
            attempt = self._attempt(request, delivery)
            self._spawn(attempt.run(), attempt)

    def _attempt(self, request: GenerateRequest, delivery: Delivery) -> Attempt:
        adopted = self._is_foreign(delivery)
        if adopted:
            namespace = msgspec.structs.replace(
                request.namespace, fingerprint=self._core.identity.fingerprint
            )
            request = msgspec.structs.replace(request, namespace=namespace)
            log.warning("request %s is taken over: no worker of its fingerprint is left", request.request_id)
        attempt = Attempt(
            self._core,
            self.publisher,
            request,
            delivery,
            engine_id=f"{request.request_id}.{next(self._numbers)}",
            busy=self._busy,
            adopted=adopted,
        )
        self._attempts[request.request_id] = attempt
        self._by_engine_id[attempt.engine_id] = attempt
        return attempt

    async def _redeemed(self, check: ClaimCheck, delivery: Delivery) -> str:
        """The attempt at a request whose prompt has to be fetched. One whose prompt is gone has ended, or is refused."""
        try:
            request = await bodies.redeem(self._core.transport, check)
        except NotFound as error:
            log.warning("request %s: %s", check.request.request_id, error.message)
            request = check.request
        except BurstlineError as error:
            log.warning("request %s is left to another attempt (%s)", check.request.request_id, error.code)
            self._core.metrics.requests.labels("abandoned").inc()
            return "abandoned"
        attempt = self._attempt(request, delivery)
        task = asyncio.current_task()
        if task is not None:
            self._tasks[task] = attempt
        return await attempt.run()

    def _is_foreign(self, delivery: Delivery) -> bool:
        """Whether it comes from another fingerprint's queue."""
        ours = subjects.queued(self._core.identity.fingerprint)
        return not matches(ours, delivery.message.subject)

    async def _pass_on(self, delivery: Delivery) -> str:
        """Another model's: for a worker of that."""
        try:
            await delivery.nak(delay_s=_PASS_ON_S)
        except BurstlineError as error:
            log.info("a delivery could not be handed back (%s); it goes by its ack wait", error.code)
        return "passed_on"

    def _spawn(self, work: Coroutine[Any, Any, str], attempt: Attempt | None) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = attempt
        self._pace()
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[str]) -> None:
        attempt = self._tasks.pop(task)
        if attempt is not None:
            self._attempts.pop(attempt.request.request_id, None)
            self._by_engine_id.pop(attempt.engine_id, None)
        self.room.give_back()
        self._pace()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an attempt ended by a fault; its request is delivered again", exc_info=error)

    def _pace(self) -> None:
        if len(self._tasks) > self._core.settings.pace_above:
            self._busy.set()
        else:
            self._busy.clear()

    async def _bury(self, delivery: Delivery) -> str:
        item = WorkItem(delivery)
        name = f"unreadable-{delivery.message.sequence}"
        try:
            await item.bury(
                self._core.transport, self._core.identity.fingerprint, name=name, reason="unreadable"
            )
            await item.drop()
        except BurstlineError as error:
            log.warning("a dead letter could not be kept (%s); its work item comes again", error.code)
            return "abandoned"
        self._core.metrics.requests.labels("unreadable").inc()
        return "unreadable"

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """The engine's events, in order. Those of requests that were given up end here."""
        for event in events:
            attempt = self._by_engine_id.get(event.request_id)
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
            attempt = self._attempts.get(received.subject.rpartition(".")[2])
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
        for attempt in list(self._attempts.values()):
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
        elif self._attempts:
            self._outage.worked()


def _request_of(work: Message) -> GenerateRequest:
    """The request of a work item, perhaps without its prompt. Raises ProtocolError for another message."""
    match work:
        case GenerateRequest():
            return work
        case ClaimCheck():
            return work.request
        case _:
            raise ProtocolError(f"a {type(work).__name__} is no work")
