"""Pulling: rank, room, faults, and the end."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from services.gpu_worker.pull import Puller, Room
from shared.errors import Unavailable
from shared.transport.base import Delivery
from tests.unit.services.gpu_worker.doubles import TwinDelivery
from tests.unit.services.gpu_worker.rig import until


class _Queue:
    """A consumer over a deque; a fetch waits until something is put in."""

    def __init__(self) -> None:
        self.items: deque[TwinDelivery] = deque()
        self.faults = 0
        self.fetches = 0
        self._event = asyncio.Event()

    def put(self, name: str) -> TwinDelivery:
        delivery = TwinDelivery(name.encode())
        self.items.append(delivery)
        self._event.set()
        return delivery

    async def fetch(self, *, limit: int, timeout: float) -> list[Delivery]:
        self.fetches += 1
        if self.faults:
            self.faults -= 1
            raise Unavailable("restarting")
        if not self.items:
            self._event.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._event.wait()
            except TimeoutError:
                return []
        return [self.items.popleft() for _ in range(min(limit, len(self.items)))]

    async def pending(self) -> int:
        return len(self.items)


class _Desk:
    def __init__(self, limit: int, queues: list[_Queue]) -> None:
        self.room = Room(limit)
        self.started: list[str] = []
        self.puller = Puller(queues, self.room, self._start, wait_s=0.2)
        self.task = asyncio.create_task(self.puller.run())

    def _start(self, delivery: Delivery) -> None:
        self.started.append(delivery.message.data.decode())

    async def end(self) -> None:
        self.puller.stop()
        await asyncio.wait_for(self.task, 10)


async def test_a_backlog_goes_by_rank_when_room_returns() -> None:
    queues = [_Queue() for _ in range(3)]
    for rank in (2, 1, 0):
        queues[rank].put(f"a{rank}")
        queues[rank].put(f"b{rank}")
    desk = _Desk(1, queues)
    for _ in range(5):
        count = len(desk.started)
        await until(lambda count=count: len(desk.started) == max(1, count))
        desk.room.give_back()
        await until(lambda count=count: len(desk.started) == max(1, count) + 1)
    assert desk.started == ["a0", "b0", "a1", "b1", "a2", "b2"]
    await desk.end()


async def test_every_queue_has_a_poll_while_there_is_room() -> None:
    queues = [_Queue() for _ in range(3)]
    desk = _Desk(3, queues)
    await until(lambda: all(queue.fetches >= 2 for queue in queues))
    queues[2].put("low")
    await until(lambda: desk.started == ["low"])
    await desk.end()


async def test_what_a_poll_brings_too_late_is_handed_back() -> None:
    queues = [_Queue() for _ in range(2)]
    desk = _Desk(1, queues)
    await until(lambda: all(queue.fetches >= 2 for queue in queues))
    first, second = queues[0].put("high"), queues[1].put("low")
    await until(lambda: desk.started == ["high"] and second.ended == "nak")
    assert first.ended == ""
    assert desk.room.taken == 1
    await desk.end()


async def test_fr_102_a_failing_fetch_is_tried_again() -> None:
    queue = _Queue()
    queue.faults = 2
    desk = _Desk(1, [queue])
    queue.put("x")
    await until(lambda: desk.started == ["x"])
    await desk.end()


@pytest.mark.parametrize("limit", [1, 2])
async def test_the_end_starts_nothing_and_leaves_no_poll(limit: int) -> None:
    queue = _Queue()
    desk = _Desk(limit, [queue])
    await until(lambda: queue.fetches >= 2)
    desk.puller.stop()
    late = queue.put("late")
    await asyncio.wait_for(desk.task, 10)
    assert desk.started == []
    assert late.ended == "nak"


async def test_an_outage_of_all_queues_is_told_once_and_over_when_the_last_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queues = [_Queue(), _Queue()]
    queues[0].faults, queues[1].faults = 1, 3
    desk = _Desk(2, queues)
    with caplog.at_level("INFO", logger="services.gpu_worker.pull"):
        await until(lambda: len(caplog.records) >= 2)
    await desk.end()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert caplog.records[1].getMessage().endswith("and 4 failures")


async def test_a_full_worker_does_not_fetch() -> None:
    queue = _Queue()
    desk = _Desk(1, [queue])
    queue.put("x")
    await until(lambda: desk.started == ["x"])
    await until(lambda: not desk.puller._polls)
    fetches = queue.fetches
    queue.put("y")
    await asyncio.sleep(0)
    assert queue.fetches == fetches
    desk.room.give_back()
    await until(lambda: desk.started == ["x", "y"])
    await desk.end()
