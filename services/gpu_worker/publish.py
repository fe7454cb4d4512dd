"""Captures become entries: reserve at the broker, keep in the engine, commit. Anything else gives the capture up (C3).

One capture at a time, in the order in which the engine told them: a deeper capture of a prompt builds on the one before.
The queue is bounded by the engine, which lets only so many captures wait. After a broker that did not answer, captures
are given up at once for a moment, so that none of them holds memory for long.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from services.gpu_worker.book import EntryBook
from services.gpu_worker.broker import BrokerRefused
from services.gpu_worker.core import Core
from services.gpu_worker.debts import unknown
from services.gpu_worker.engine.events import Captured
from services.gpu_worker.evict import Evictor
from shared.errors import EngineFault, Unavailable
from shared.protocol.chain import LAYOUT_VERSION
from shared.protocol.messages import Commit, Done, NamespaceParts, Reserve, ReserveReply
from shared.telemetry import Parent, fail

_MAX_WAITING: Final = 256
_EVICT_ROUNDS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose capture it is."""

    request_id: str
    namespace: NamespaceParts
    root: bytes
    parent: Parent


class _Refused(Exception):
    """The broker's decision against a capture."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class Publisher:
    """Belongs to the event loop; `run` is its one worker task."""

    def __init__(self, core: Core, book: EntryBook, evictor: Evictor) -> None:
        self._core = core
        self._book = book
        self._evictor = evictor
        self._queue: asyncio.Queue[tuple[Captured, Owner | None]] = asyncio.Queue(_MAX_WAITING)
        self._open: dict[str, set[int]] = {}
        self._changed = asyncio.Condition()
        self._away_until_ns = 0

    def offer(self, capture: Captured, owner: Owner | None) -> None:
        """Take a capture over. Without an owner (its request was given up) it is discarded in turn."""
        self._open.setdefault(capture.request_id, set()).add(capture.capture_id)
        try:
            self._queue.put_nowait((capture, owner))
        except asyncio.QueueFull as full:
            raise EngineFault(f"more than {_MAX_WAITING} captures wait for the broker") from full

    async def settled(self, engine_id: str, *, limit_s: float) -> bool:
        """Wait until no capture of this request is under way. False after `limit_s`."""
        if engine_id not in self._open:
            return True
        try:
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(lambda: engine_id not in self._open)
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Handle captures one by one. Ends by cancellation alone."""
        while True:
            capture, owner = await self._queue.get()
            try:
                await self._handle(capture, owner)
            finally:
                await self._close(capture)

    async def _close(self, capture: Captured) -> None:
        waiting = self._open.get(capture.request_id, set())
        waiting.discard(capture.capture_id)
        if not waiting:
            self._open.pop(capture.request_id, None)
        async with self._changed:
            self._changed.notify_all()

    async def _handle(self, capture: Captured, owner: Owner | None) -> None:
        if owner is None:
            await self._discard(capture, "orphan")
            return
        attributes = {"burstline.position": capture.position, "burstline.bytes": _bytes(capture)}
        with self._core.telemetry.span("cache.publish", owner.parent, attributes) as span:
            try:
                await self._publish(capture, owner, span)
            except _Refused as refused:
                outcome = refused.outcome
            except (Unavailable, BrokerRefused) as error:
                outcome = error.code if isinstance(error, BrokerRefused) else "broker_away"
                fail(span, error)
                if isinstance(error, Unavailable):
                    self._away_until_ns = self._now_ns() + int(self._core.settings.broker_cooldown_s * 1e9)
            else:
                outcome = "published"
            span.set_attribute("burstline.outcome", outcome)
            if outcome == "published":
                self._count(outcome)
            else:
                await self._discard(capture, outcome)

    async def _publish(self, capture: Captured, owner: Owner, parent: Parent) -> None:
        if self._now_ns() < self._away_until_ns:
            raise _Refused("broker_away")
        async with self._evictor.turn:
            reservation = await self._keep(capture, owner, parent)
        await self._commit(reservation, capture, parent)

    async def _keep(self, capture: Captured, owner: Owner, parent: Parent) -> str:
        """Reserve, then make it an entry; answers the reservation."""
        if not await self._evictor.settle(parent):
            raise _Refused("broker_away")
        call = self._reservation(capture, owner)
        try:
            reservation = await self._reserve(call, parent)
        except (Unavailable, BrokerRefused) as error:
            if unknown(error):
                self._evictor.forgo(call)
            raise
        if not await self._core.host.call(lambda engine: engine.publish(capture.capture_id)):
            self._evictor.forgo(call)
            raise _Refused("stale")
        self._evictor.published(capture.key)
        self._book.publish(owner.root, capture)
        return reservation

    async def _reserve(self, call: Reserve, parent: Parent) -> str:
        for round_left in range(_EVICT_ROUNDS, -1, -1):
            reply = await self._core.broker.ask(call, ReserveReply, parent)
            if reply.decision == "granted" and reply.reservation_id is not None:
                return reply.reservation_id
            if reply.decision != "evict":
                raise _Refused(reply.decision)
            if not round_left or not await self._evictor.free(reply.evict, reason="quota", parent=parent):
                break
        raise _Refused("skips_pinned")

    def _reservation(self, capture: Captured, owner: Owner) -> Reserve:
        who = self._core.identity
        try:
            parent_position = self._book.position(capture.parent_key)
        except KeyError:
            raise _Refused("stale") from None
        return Reserve(
            request_id=owner.request_id,
            worker_id=who.worker_id,
            epoch=who.epoch,
            namespace=owner.namespace,
            root=owner.root,
            key=capture.key,
            parent=capture.parent_key,
            splits=capture.splits_key,
            layout_version=LAYOUT_VERSION,
            position=capture.position,
            parent_position=parent_position,
            state_bytes=capture.state_bytes,
            kv_bytes=capture.kv_bytes,
        )

    async def _commit(self, reservation: str, capture: Captured, parent: Parent) -> None:
        """Make it visible. Asked twice, as a lost answer is likelier than a lost broker; then the entry is taken back,
        because a reservation that expires would leave bytes that nobody is charged for."""
        who = self._core.identity
        call = Commit(reservation_id=reservation, worker_id=who.worker_id, epoch=who.epoch, digest="")
        try:
            try:
                await self._core.broker.ask(call, Done, parent)
            except Unavailable:
                await self._core.broker.ask(call, Done, parent)
        except (Unavailable, BrokerRefused):
            await self._evictor.reclaim((capture.key,), reason="uncommitted")
            raise

    async def _discard(self, capture: Captured, outcome: str) -> None:
        await self._core.host.call(lambda engine: engine.discard(capture.capture_id))
        self._count(outcome)

    def _count(self, outcome: str) -> None:
        self._core.metrics.captures.labels(outcome).inc()

    def _now_ns(self) -> int:
        return self._core.clock.monotonic_ns()


def _bytes(capture: Captured) -> int:
    return capture.state_bytes + capture.kv_bytes
