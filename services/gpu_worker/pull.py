"""Pulling work: by turns among the subjects that have some, and never more than there is room for.

What has work is heard (a bell for every new request) and looked for (redeliveries ring no bell, and a bell can be missed).
One request is taken at a time, so what nobody has room for stays in the queue; but for the first of a tenant that has
nothing here, once others had the time to take it. While nothing is known to wait, long polls stand on the subjects that were
heard of last (`services.gpu_worker.posts`). In the pull groups of its own queue a worker goes before the others
(`shared.protocol.subjects`), who take only what it has left there from one look to the next, because it is full, or gone.

A lane that cannot be pulled from rests for itself (`services.gpu_worker.setbacks`), and is tried again beside the others, since it
may not answer at all; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from services.gpu_worker.posts import Posts
from services.gpu_worker.room import Room
from services.gpu_worker.setbacks import Setbacks
from services.gpu_worker.turns import Turns
from shared.clock import SYSTEM, Clock
from shared.errors import BurstlineError
from shared.lifecycle import cancel_and_wait
from shared.outage import Outage
from shared.protocol import subjects
from shared.transport.base import Delivery, PullConsumer, Subscription, Transport

log = logging.getLogger(__name__)

_FAR: Final = 10  # of so many looks one goes over the requests of all fingerprints
_TRIALS: Final = 8  # lanes at fault that are tried at once; the others wait for a later look
_MANNERS_S: Final = 0.05  # a full worker leaves a newcomer so long to those who have room


class Puller:
    """Belongs to the event loop. `start` gets each delivery with a place in the room already taken."""

    def __init__(
        self,
        transport: Transport,
        room: Room,
        start: Callable[[Delivery], None],
        *,
        fingerprint: str,
        worker_id: str,
        ack_wait_s: float,
        wait_s: float,
        look_s: float,
        taken: Callable[[str], None],
        seen: Callable[[Mapping[str, int]], None],
        gone: Callable[[str], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        """`wait_s` is the length of a long poll, `look_s` the time between two looks;
        `taken` is told the queue of every delivery, `seen` what every look saw: requests by subject, claimed or not.
        `gone`: has no worker of a fingerprint (its first 16 digits) been left, so that its requests are anybody's."""
        self._transport = transport
        self._consumers: dict[str, PullConsumer] = {}
        self._room = room
        self._start = start
        self._everything = subjects.queued(fingerprint)
        self._own = subjects.own_queue(fingerprint, worker_id)
        self._ack_wait_s = ack_wait_s
        self._wait_s = wait_s
        self._look_s = look_s
        self._taken = taken
        self._seen = seen
        self._gone = gone
        self._looks = 0
        self._turns = Turns(self._own)
        self._wake = asyncio.Event()
        self._posts = Posts(self._own, self._poll, on_over=self._wake.set)
        self._stopping = False
        self._looking = Outage(log, "looks for work", clock=clock)
        self._setbacks = Setbacks(Outage(log, "pulls of work", clock=clock), clock)
        self._trials: dict[str, asyncio.Task[None]] = {}
        room.on_free = self._wake.set

    def stop(self) -> None:
        """Pull no more; `run` returns when the polls under way are over."""
        self._stopping = True
        self._wake.set()

    # ---- what is there ---------------------------------------------------------------------------------------------

    async def listen(self, bells: Subscription) -> None:
        """Hear of new requests. Ends with the subscription, which is a fault."""
        async for bell in bells:
            subject = subjects.rung(bell.subject)
            if not self._posts.answers(subject):
                self._heard(subject)
                self._wake.set()
        raise BurstlineError("the subscription to new requests ended")

    async def look_around(self) -> None:
        """Look every `look_s`. Ends by cancellation alone."""
        while True:
            try:
                await self._look()
                self._looking.worked()
                self._wake.set()
            except BurstlineError as error:
                self._looking.failed(error.code)
            await asyncio.sleep(self._look_s)

    async def _look(self) -> None:
        counts = await self._transport.waiting(subjects.REQUESTS.name, self._everything)
        self._seen(counts)
        self._looks += 1
        if self._looks % _FAR == 0:
            far = await self._transport.waiting(subjects.REQUESTS.name, subjects.REQUESTS.subjects[0])
            counts |= {
                subject: count
                for subject, count in far.items()
                if self._gone(subjects.fingerprint_of(subject))
            }
        self._turns.looked(
            {subject: count for subject, count in counts.items() if not self._left_alone(subject)}
        )

    def _heard(self, subject: str) -> None:
        """Something came; where pulls fail it is left to a look after the rest."""
        if not self._left_alone(subject):
            self._turns.heard(subject)

    def _left_alone(self, subject: str) -> bool:
        """Whether a lane rests, or is being tried."""
        return self._setbacks.resting(subject) or subject in self._trials

    # ---- taking it -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pull until `stop`."""
        try:
            while not self._stopping:
                self._look_at_posts()
                subject = self._turns.next() if self._room.free > 0 else None
                if subject is not None:
                    await self._take(subject)
                elif not await self._take_newcomers():
                    await self._rest()
            while self._posts.standing:
                await asyncio.wait(self._posts.standing, return_when=asyncio.FIRST_COMPLETED)
                self._look_at_posts()
        finally:
            await cancel_and_wait(self._trials.values())
            await self._posts.cancel()

    def _look_at_posts(self) -> None:
        for subject in self._posts.over():
            self._heard(subject)
        for subject in [name for name, trial in self._trials.items() if trial.done()]:
            self._trials.pop(subject).result()

    async def _take_newcomers(self) -> bool:
        """The room is full: the first of every subject of which nothing is here. Whether there was any."""
        newcomers = self._turns.newcomers(self._room.welcomes)
        if newcomers:
            await asyncio.sleep(_MANNERS_S)
        for subject in newcomers:
            if not self._stopping and self._room.welcomes(subject):
                await self._take(subject)
        return bool(newcomers)

    async def _take(self, subject: str) -> None:
        """One request of a subject, if it has one; of a lane that failed, when it answers."""
        if self._setbacks.failing(subject):
            self._turns.empty(subject)  # a look finds it again
            if subject not in self._trials and len(self._trials) < _TRIALS:
                self._trials[subject] = asyncio.create_task(self._try(subject))
            return
        try:
            delivery = await self._ask(subject)
        except BurstlineError as error:
            self._turns.empty(subject)
            self._setbacks.failed(subject, error.code)
            return
        self._setbacks.worked(subject)
        if delivery is None:
            self._turns.empty(subject)
            return
        self._turns.took(subject)
        await self._accept((delivery,))

    async def _try(self, subject: str) -> None:
        """The same of a lane that failed before, beside the others."""
        try:
            delivery = await self._ask(subject)
            self._setbacks.worked(subject)
            if delivery is not None:
                self._turns.heard(subject)  # there may be more
                await self._accept((delivery,))
        except BurstlineError as error:
            self._setbacks.failed(subject, error.code)
        finally:
            self._wake.set()

    async def _ask(self, subject: str) -> Delivery | None:
        spec = subjects.work_consumer(subject, ack_wait_s=self._ack_wait_s)
        priority = 0 if subject.startswith(self._own) else 1
        return await self._transport.take(spec, priority=priority)

    async def _rest(self) -> None:
        """Until there may be something to do, with long polls if there is room."""
        self._posts.fill(self._room.free, but=self._left_alone)
        await self._wake.wait()
        self._wake.clear()

    async def _poll(self, subject: str) -> bool:
        """Wait for one request of a subject, and start it at once. False after a while without one, and after a fault."""
        try:
            if subject not in self._consumers:
                spec = subjects.work_consumer(subject, ack_wait_s=self._ack_wait_s)
                self._consumers[subject] = await self._transport.ensure_consumer(spec)
            deliveries = await self._consumers[subject].fetch(limit=1, timeout=self._wait_s)
            self._setbacks.worked(subject)
            await self._accept(deliveries)
            if not self._posts.wants(subject):
                await self._consumers.pop(subject).close()
        except BurstlineError as error:
            self._setbacks.failed(subject, error.code)
            return False
        return bool(deliveries)

    async def _accept(self, deliveries: Sequence[Delivery]) -> None:
        """Start them; what comes when the room is gone is handed back at once."""
        for delivery in deliveries:
            subject = delivery.message.subject
            if not self._stopping and self._room.take(subject):
                self._taken(self._turns.queue(subject))
                self._start(delivery)
                continue
            try:
                await delivery.nak()
            except BurstlineError as error:
                log.info("a delivery could not be handed back (%s); it goes by its ack wait", error.code)
