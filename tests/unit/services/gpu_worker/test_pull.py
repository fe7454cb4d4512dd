"""Pulling: turns, room, faults, and the end, on the queue in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.gpu_worker.posts import MOST
from services.gpu_worker.pull import Puller
from services.gpu_worker.room import Room
from services.gpu_worker.setbacks import FIRST_S
from shared.clock import SYSTEM, Clock, ManualClock
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.messages import Priority
from shared.protocol.subjects import ConsumerSpec
from shared.transport.base import Delivery, PullConsumer
from shared.transport.memory import MemoryServer, MemoryTransport
from tests.waiting import until

FINGERPRINT = "f" * 64
OWN = subjects.request_to(FINGERPRINT, "w1", "t")


class _Desk:
    """A puller at work on a queue of its own."""

    def __init__(self, transport: MemoryTransport, limit: int, guests: int) -> None:
        self.transport = transport
        self.room = Room(limit, guests=guests)
        self.subjects: list[str] = []
        self.started: list[str] = []
        self.queues: list[str] = []
        self.puller: Puller

    def start(self, delivery: Delivery) -> None:
        self.started.append(delivery.message.data.decode())
        self.subjects.append(delivery.message.subject)

    async def put(self, name: str, *, priority: Priority = "normal", tenant: str = "t", to: str = "") -> None:
        shared = subjects.request_shared(FINGERPRINT, priority, tenant)
        await self.transport.append(
            subjects.request_to(FINGERPRINT, to, tenant) if to else shared, name.encode()
        )

    async def one_more(self) -> None:
        """Let the newest end, and wait for the next."""
        count = len(self.started)
        self.room.give_back(self.subjects[-1])
        await until(lambda: len(self.started) == count + 1)


@asynccontextmanager
async def _desk(
    limit: int, *, guests: int = 0, bells: bool = True, look_s: float = 0.02, clock: Clock = SYSTEM
) -> AsyncIterator[_Desk]:
    transport = MemoryServer().transport()
    await transport.ensure_stream(subjects.REQUESTS)
    desk = _Desk(transport, limit, guests)
    desk.puller = Puller(
        transport,
        desk.room,
        desk.start,
        fingerprint=FINGERPRINT,
        worker_id="w1",
        ack_wait_s=15,
        wait_s=0.2,
        look_s=look_s,
        taken=desk.queues.append,
        seen=lambda counts: None,
        gone=lambda fingerprint: False,
        clock=clock,
    )
    heard = await transport.subscribe(subjects.bells(FINGERPRINT) if bells else "nothing")
    tasks = [asyncio.create_task(desk.puller.listen(heard)), asyncio.create_task(desk.puller.look_around())]
    running = asyncio.create_task(desk.puller.run())
    try:
        yield desk
    finally:
        desk.puller.stop()
        await asyncio.wait_for(running, 10)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_bell_brings_a_request_at_once() -> None:
    async with _desk(3, look_s=60) as desk:
        for priority in ("low", "normal", "high"):
            await desk.put(priority, priority=priority)
            await until(lambda priority=priority: desk.started[-1:] == [priority])


async def test_without_bells_a_look_finds_it() -> None:
    async with _desk(2, bells=False) as desk:
        await desk.put("x")
        await until(lambda: desk.started == ["x"])


async def test_c2_a_newcomer_waits_for_one_request_of_each_other_tenant() -> None:
    async with _desk(1) as desk:
        for number in range(30):
            await desk.put(f"a{number}", tenant="a")
        await until(lambda: desk.started == ["a0"])
        await desk.put("b0", tenant="b")
        await desk.put("b1", tenant="b")
        for _ in range(4):
            await desk.one_more()
        assert "b0" in desk.started[1:3]
        assert "b1" in desk.started[3:5]


async def test_a_flood_of_its_own_requests_does_not_starve_the_others() -> None:
    async with _desk(1) as desk:
        for number in range(10):
            await desk.put(f"own{number}", to="w1")
        await desk.put("low", priority="low")
        await desk.put("normal")
        while not {"low", "normal"} <= set(desk.started):
            await desk.one_more()
        assert desk.started.index("normal") <= 4
        assert len(desk.started) < 12


async def test_a_full_worker_leaves_the_queue_alone() -> None:
    async with _desk(1) as desk:
        await desk.put("x")
        await until(lambda: desk.started == ["x"])
        await desk.put("y")
        other = await desk.transport.take(
            subjects.work_consumer(subjects.request_shared(FINGERPRINT, "normal", "t"), ack_wait_s=15)
        )
        assert other is not None
        assert other.delivery_count == 1


async def test_c2_a_full_worker_takes_the_first_of_a_tenant_that_has_nothing_here_and_no_second() -> None:
    async with _desk(2, guests=2) as desk:
        for number in range(20):
            await desk.put(f"a{number}", tenant="a")
        await until(lambda: desk.started == ["a0", "a1"])
        for tenant in ("b", "c", "d"):
            await desk.put(f"{tenant}0", tenant=tenant)
            await desk.put(f"{tenant}1", tenant=tenant)
        await until(lambda: len(desk.started) == 4)
        assert sorted(desk.started[2:]) == ["b0", "c0"]
        assert (desk.room.taken, desk.room.free) == (4, 0)
        desk.room.give_back(
            desk.subjects[0]
        )  # an end of the tenant's own makes room for one guest more, and for no other
        await until(lambda: len(desk.started) == 5)
        assert desk.started[4] == "d0"


async def test_a_full_worker_leaves_a_newcomer_to_one_that_has_room() -> None:
    async with _desk(1, guests=1) as desk:
        await desk.put("x", tenant="a")
        await until(lambda: desk.started == ["x"])
        await desk.put("y", tenant="b")
        other = await desk.transport.take(
            subjects.work_consumer(subjects.request_shared(FINGERPRINT, "normal", "b"), ack_wait_s=15)
        )
        assert other is not None
    assert desk.started == ["x"]


async def test_fr_102_a_failing_take_is_tried_again_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with _desk(1) as desk:
        take, faults = desk.transport.take, [Unavailable("restarting")] * 2

        async def failing(*given: object, **named: object) -> Delivery | None:
            if faults:
                raise faults.pop()
            return await take(*given, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(desk.transport, "take", failing)
        with caplog.at_level("INFO", logger="services.gpu_worker.pull"):
            await desk.put("x")
            await until(lambda: desk.started == ["x"])
        assert [record.levelname for record in caplog.records].count("ERROR") == 0


def _break(monkeypatch: pytest.MonkeyPatch, desk: _Desk, tenants: set[str]) -> list[str]:
    """Pulls on the lanes of these tenants fail from now on; answers the durables of those that did."""
    take, ensure = desk.transport.take, desk.transport.ensure_consumer
    lanes = {subjects.request_shared(FINGERPRINT, "normal", tenant): tenant for tenant in tenants}
    tries: list[str] = []

    def check(spec: ConsumerSpec) -> None:
        tenant = lanes.get(spec.filter_subject)
        if tenant in tenants:
            tries.append(tenant)
            raise Unavailable("no leader")

    async def taking(spec: ConsumerSpec, *, priority: int = 0) -> Delivery | None:
        check(spec)
        return await take(spec, priority=priority)

    async def ensuring(spec: ConsumerSpec) -> PullConsumer:
        check(spec)
        return await ensure(spec)

    monkeypatch.setattr(desk.transport, "take", taking)
    monkeypatch.setattr(desk.transport, "ensure_consumer", ensuring)
    return tries


async def test_fr_102_lanes_that_fail_delay_no_other_and_are_left_alone_for_their_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a clock that stands still: each is tried once, and the sound lane's requests come meanwhile."""
    clock, bad = ManualClock(), {f"bad{number}" for number in range(12)}
    async with _desk(64, clock=clock) as desk:
        tries = _break(monkeypatch, desk, bad)
        for tenant in sorted(bad):
            await desk.put(tenant, tenant=tenant)
        async with asyncio.timeout(5):  # half a second each would be six
            for number in range(20):
                await desk.put(f"good{number}", tenant="good")
                await desk.put("more", tenant="bad0")
                await until(lambda number=number: desk.started[-1:] == [f"good{number}"])
        assert sorted(tries) == sorted(bad)
        for rest_s in (FIRST_S, 2 * FIRST_S):
            tries.clear()
            clock.advance(rest_s)
            await until(lambda: set(tries) == bad)
        bad.clear()
        clock.advance(4 * FIRST_S)
        await until(lambda: len(desk.started) == 20 + 12 + 20)


async def _hanging(
    monkeypatch: pytest.MonkeyPatch, desk: _Desk, tenant: str
) -> tuple[list[int], asyncio.Event]:
    """The first take on the tenant's lane fails, and the later ones hang until the event. Answers who hangs, and the event."""
    take, lane = desk.transport.take, subjects.request_shared(FINGERPRINT, "normal", tenant)
    tries, hang, answers = 0, [0], asyncio.Event()

    async def taking(spec: ConsumerSpec, *, priority: int = 0) -> Delivery | None:
        nonlocal tries
        if spec.filter_subject == lane:
            tries += 1
            if tries == 1:
                raise Unavailable("no answer")
            hang[0] += 1
            try:
                await answers.wait()
            finally:
                hang[0] -= 1
        return await take(spec, priority=priority)

    monkeypatch.setattr(desk.transport, "take", taking)
    return hang, answers


async def test_fr_102_a_lane_that_failed_is_tried_beside_the_others_however_long_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    async with _desk(16, bells=False, clock=clock) as desk:
        hang, answers = await _hanging(monkeypatch, desk, "bad")
        await desk.put("bad", tenant="bad")
        await desk.put("good", tenant="good")
        await until(lambda: desk.started == ["good"])
        clock.advance(FIRST_S)
        await until(lambda: hang == [1])
        for number in range(5):
            await desk.put("bad, more", tenant="bad")
            await desk.put(f"good{number}", tenant="good")
            await until(lambda number=number: desk.started[-1:] == [f"good{number}"])
        assert hang == [1], "one try at a time"
        answers.set()
        await until(lambda: len(desk.started) == 12)
        assert desk.started.count("bad, more") == 5


async def test_the_end_does_not_wait_for_a_lane_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    async with _desk(8, bells=False, clock=clock) as desk:
        hang, _ = await _hanging(monkeypatch, desk, "bad")
        await desk.put("bad", tenant="bad")
        await until(lambda: len(desk.puller._setbacks) == 1)
        clock.advance(FIRST_S)
        await until(lambda: hang == [1])
    assert hang == [0]
    assert desk.started == []


@pytest.mark.parametrize("limit", [1, 2])
async def test_the_end_starts_nothing_more(limit: int) -> None:
    async with _desk(limit) as desk:
        desk.puller.stop()
        await desk.put("late", to="w1")
    assert desk.started == []
    again = await desk.transport.take(subjects.work_consumer(OWN, ack_wait_s=15))
    assert again is not None  # handed back, or never taken


async def _polling(desk: _Desk, subject: str) -> None:
    """Wait until a long poll stands on a subject."""
    durable = subjects.work_consumer(subject, ack_wait_s=15).durable
    consumers = desk.transport.server.streams[subjects.REQUESTS.name].consumers
    await until(lambda: durable in consumers and consumers[durable].waiters == 1)


async def test_a_poll_stands_where_something_came_and_brings_the_next_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _desk(8, look_s=60) as desk:
        await desk.put("first")
        await _polling(desk, subjects.request_shared(FINGERPRINT, "normal", "t"))

        async def asked(*given: object, **named: object) -> Delivery | None:
            raise AssertionError("it was asked for")

        monkeypatch.setattr(desk.transport, "take", asked)
        for name in ("second", "third"):
            await desk.put(name)
            await until(lambda name=name: desk.started[-1:] == [name])
            await _polling(desk, subjects.request_shared(FINGERPRINT, "normal", "t"))


async def test_a_poll_brings_one_and_those_who_came_with_it_are_asked_for() -> None:
    async with _desk(8, look_s=60) as desk:
        await desk.put("first")
        await _polling(desk, subjects.request_shared(FINGERPRINT, "normal", "t"))
        for number in range(4):
            await desk.put(f"n{number}")
        await until(lambda: len(desk.started) == 5)


async def test_no_more_polls_stand_than_there_are_places() -> None:
    """Else a poll would bring what there is no room for, and another worker would have to wait for it."""
    async with _desk(3, look_s=60) as desk:
        for tenant in ("a", "b"):
            await desk.put(tenant, tenant=tenant)
        await until(lambda: sorted(desk.started) == ["a", "b"])
        await _polling(desk, subjects.request_shared(FINGERPRINT, "normal", "b"))
        consumers = desk.transport.server.streams[subjects.REQUESTS.name].consumers
        assert sum(consumer.waiters for consumer in consumers.values()) == 1


async def test_polls_are_kept_for_the_lanes_heard_of_last_alone() -> None:
    """Tenants come and go; what a worker holds for them does not grow."""
    async with _desk(64, look_s=60) as desk:
        for number in range(3 * MOST):
            await desk.put(f"r{number}", tenant=f"t{number}")
            await until(lambda number=number: len(desk.started) == number + 1)
        await until(lambda: len(desk.puller._consumers) <= MOST)
        consumers = desk.transport.server.streams[subjects.REQUESTS.name].consumers
        await until(lambda: 0 < sum(consumer.waiters for consumer in consumers.values()) <= MOST)
