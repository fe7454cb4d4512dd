"""Deliveries become attempts: each holds a place in the room until its task ends, whatever the way out."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from services.gpu_worker.attempt import Attempt
from services.gpu_worker.core import Core
from services.gpu_worker.item import WorkItem
from services.gpu_worker.publish import Publisher
from services.gpu_worker.room import Room
from shared.errors import BurstlineError, NotFound, ProtocolError
from shared.lifecycle import cancel_and_wait
from shared.protocol import codec, subjects
from shared.protocol.messages import ClaimCheck, GenerateRequest, Message
from shared.transport import bodies
from shared.transport.base import Delivery
from shared.transport.wire import matches

log = logging.getLogger(__name__)

_PASS_ON_S: Final = 2.0
_HAND_BACK_S: Final = 10.0
"""How long a request may take to be handed back before it is asked again to end."""


@dataclass
class _Place:
    """Who holds a place: its request's subject, and the attempt once there is one."""

    subject: str
    attempt: Attempt | None


class Reception:
    """Belongs to the event loop."""

    def __init__(self, core: Core, publisher: Publisher) -> None:
        self._core = core
        self._publisher = publisher
        self.room = Room(core.settings.max_running, guests=core.settings.max_running)
        self.attempts: dict[str, Attempt] = {}
        """By request."""
        self.by_engine_id: dict[str, Attempt] = {}
        self._tasks: dict[asyncio.Task[str], _Place] = {}
        self._numbers = itertools.count(1)
        self._busy = asyncio.Event()

    def begin(self, delivery: Delivery) -> None:
        """Start the attempt of a delivery, which holds a place in the room."""
        try:
            work = codec.decode(delivery.message.data)
            request = _request_of(work)
            subjects.tokens(request.request_id)  # an id that is no subject token could reach other subjects
        except ProtocolError as error:
            log.warning("a work item cannot be read and is kept as a dead letter: %s", error.code)
            self._spawn(self._bury(delivery), delivery, None)
            return
        active = self.attempts.get(request.request_id)
        if active is not None:
            active.adopt(delivery)
            self.room.give_back(delivery.message.subject)
        elif self._is_foreign(delivery) and request.model != self._core.identity.model:
            self._spawn(self._pass_on(delivery), delivery, None)
        elif isinstance(work, ClaimCheck):
            self._spawn(self._redeemed(work, delivery), delivery, None)
        else:
            attempt = self._attempt(request, delivery)
            self._spawn(attempt.run(), delivery, attempt)

    async def settle(self, limit_s: float) -> None:
        """Give the attempts `limit_s` to end; the rest is handed back to the queue."""
        if self._tasks and limit_s:
            await asyncio.wait(self._tasks, timeout=limit_s)
        if self._tasks:
            log.warning("%d requests are handed back", len(self._tasks))
        await cancel_and_wait(list(self._tasks), patience_s=_HAND_BACK_S)

    def _attempt(self, request: GenerateRequest, delivery: Delivery, *, prompt_lost: bool = False) -> Attempt:
        adopted = self._is_foreign(delivery)
        if adopted:
            namespace = msgspec.structs.replace(
                request.namespace, fingerprint=self._core.identity.fingerprint
            )
            request = msgspec.structs.replace(request, namespace=namespace)
            log.warning("request %s is taken over: no worker of its fingerprint is left", request.request_id)
        attempt = Attempt(
            self._core,
            self._publisher,
            request,
            delivery,
            engine_id=f"{request.request_id}.{next(self._numbers)}",
            busy=self._busy,
            adopted=adopted,
            prompt_lost=prompt_lost,
        )
        self.attempts[request.request_id] = attempt
        self.by_engine_id[attempt.engine_id] = attempt
        return attempt

    async def _redeemed(self, check: ClaimCheck, delivery: Delivery) -> str:
        """The attempt at a request whose prompt has to be fetched. One whose prompt is gone has ended, or it is looked for a few
        times before the request is refused."""
        lost = False
        try:
            request = await bodies.redeem(self._core.transport, check)
        except NotFound as error:
            log.warning("request %s: %s", check.request.request_id, error.message)
            request, lost = check.request, True
        except BurstlineError as error:
            log.warning("request %s is left to another attempt (%s)", check.request.request_id, error.code)
            self._core.metrics.requests.labels("abandoned").inc()
            return "abandoned"
        attempt = self._attempt(request, delivery, prompt_lost=lost)
        task = asyncio.current_task()
        if task is not None:
            self._tasks[task].attempt = attempt
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

    def _spawn(self, work: Coroutine[Any, Any, str], delivery: Delivery, attempt: Attempt | None) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = _Place(delivery.message.subject, attempt)
        self._pace()
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[str]) -> None:
        place = self._tasks.pop(task)
        if place.attempt is not None:
            self.attempts.pop(place.attempt.request.request_id, None)
            self.by_engine_id.pop(place.attempt.engine_id, None)
        self.room.give_back(place.subject)
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


def _request_of(work: Message) -> GenerateRequest:
    """The request of a work item, perhaps without its prompt. Raises ProtocolError for another message."""
    match work:
        case GenerateRequest():
            return work
        case ClaimCheck():
            return work.request
        case _:
            raise ProtocolError(f"a {type(work).__name__} is no work")
