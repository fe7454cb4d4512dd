"""Pulling work: own queue first, then the shared ones by priority, and never more than there is room for.

While there is room, every queue has one long poll outstanding, so that none of them starves and an idle worker answers at
once. When room returns after the worker was full, the queues are first swept in their order: a backlog of high priority
goes before one of low. What a long poll brings when the room is gone meanwhile is handed back at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from shared.errors import BurstlineError
from shared.outage import Outage
from shared.transport.base import Delivery, PullConsumer

log = logging.getLogger(__name__)

_SWEEP_S: Final = 0.05
_FAULT_PAUSE_S: Final = 0.5


class Room:
    """How many requests may run at once, and how many do."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self.freed = asyncio.Event()

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def free(self) -> int:
        return self._limit - self._taken

    def take(self) -> bool:
        """One place, if there is one."""
        if self.free <= 0:
            return False
        self._taken += 1
        return True

    def give_back(self) -> None:
        self._taken -= 1
        self.freed.set()


class Puller:
    """Belongs to the event loop. `start` gets each delivery with a place in the room already taken."""

    def __init__(
        self,
        consumers: Sequence[PullConsumer],
        room: Room,
        start: Callable[[Delivery], None],
        *,
        wait_s: float,
    ) -> None:
        """`consumers` in the order of their rank; `wait_s` is the length of a long poll."""
        self._consumers = list(consumers)
        self._room = room
        self._start = start
        self._wait_s = wait_s
        self._polls: dict[asyncio.Task[list[Delivery]], int] = {}
        self._stop = asyncio.Event()
        self._failing: set[PullConsumer] = set()
        self._outage = Outage(log, "pulls of work")

    def stop(self) -> None:
        """Pull no more; `run` returns when the polls under way are over."""
        self._stop.set()
        self._room.freed.set()

    async def run(self) -> None:
        """Pull until `stop`."""
        was_full = True
        try:
            while not self._stop.is_set():
                if self._room.free and was_full:
                    await self._sweep()
                was_full = not self._room.free
                if not was_full:
                    self._poll()
                await self._next()
            while self._polls:
                await self._next()
        finally:
            for poll in self._polls:
                poll.cancel()

    async def _sweep(self) -> None:
        """One short look at every queue, by rank, until the room is full."""
        for consumer in self._consumers:
            while self._room.free and not self._stop.is_set():
                deliveries = await self._fetch(consumer, limit=self._room.free, wait_s=_SWEEP_S)
                await self._accept(deliveries)
                if not deliveries:
                    break

    def _poll(self) -> None:
        """A long poll on every queue that has none."""
        waiting = set(self._polls.values())
        for rank, consumer in enumerate(self._consumers):
            if rank not in waiting:
                poll = asyncio.create_task(self._fetch(consumer, limit=1, wait_s=self._wait_s))
                self._polls[poll] = rank

    async def _next(self) -> None:
        """Until a poll ends or, when the worker is full, room returns."""
        self._room.freed.clear()
        waits: set[asyncio.Task[Any]] = set(self._polls)
        freed: asyncio.Task[Any] | None = None
        if not self._stop.is_set() and not self._room.free:
            freed = asyncio.create_task(self._room.freed.wait())
            waits.add(freed)
        if not waits:
            return
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if freed is not None:
                freed.cancel()
        for poll in sorted((poll for poll in self._polls if poll.done()), key=lambda poll: self._polls[poll]):
            del self._polls[poll]
            await self._accept(poll.result())

    async def _fetch(self, consumer: PullConsumer, *, limit: int, wait_s: float) -> list[Delivery]:
        try:
            deliveries = await consumer.fetch(limit=limit, timeout=wait_s)
        except BurstlineError as error:
            self._failing.add(consumer)
            self._outage.failed(error.code)
            await asyncio.sleep(_FAULT_PAUSE_S)
            return []
        self._failing.discard(consumer)
        if not self._failing:
            self._outage.worked()
        return deliveries

    async def _accept(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if not self._stop.is_set() and self._room.take():
                self._start(delivery)
                continue
            try:
                await delivery.nak()
            except BurstlineError as error:
                log.info("a delivery could not be handed back (%s); it goes by its ack wait", error.code)
