"""Fair turns on a real server, and what they cost when nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gpu_worker.pull import Puller
from services.gpu_worker.room import Room
from shared.protocol import subjects
from shared.transport.base import Delivery, Transport
from shared.transport.nats import connect
from tests.waiting import until

FINGERPRINT = "f" * 64


@asynccontextmanager
async def _pulling(
    transport: Transport, room: Room, started: list[Delivery], held: list[str], name: str
) -> AsyncIterator[None]:
    def start(delivery: Delivery) -> None:
        started.append(delivery)
        held.append(delivery.message.subject)

    puller = Puller(
        transport,
        room,
        start,
        fingerprint=FINGERPRINT,
        worker_id=name,
        ack_wait_s=30,
        wait_s=1.0,
        look_s=0.4,
        taken=lambda queue: None,
        seen=lambda counts: None,
        gone=lambda fingerprint: False,
    )
    bells = await transport.subscribe(subjects.bells(FINGERPRINT))
    parts = [asyncio.create_task(puller.listen(bells)), asyncio.create_task(puller.look_around())]
    running = asyncio.create_task(puller.run())
    try:
        yield
    finally:
        puller.stop()
        await asyncio.wait_for(running, 30)
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        await bells.close()


async def test_c2_a_thousand_queued_requests_delay_another_tenants_first_by_one_each(
    nats_url: str,
) -> None:
    """Two flooded lanes, two workers with one place each: the newcomer's first is among the next few."""
    gateway = await connect(nats_url, name="gateway")
    for spec in subjects.STREAMS:
        await gateway.ensure_stream(spec)
    flood = [subjects.request_shared(FINGERPRINT, "normal", tenant) for tenant in ("a", "b")]
    newcomer = subjects.request_shared(FINGERPRINT, "normal", "newcomer")
    assert len({*flood, newcomer}) == 3
    for begin in range(0, 500, 50):
        await asyncio.gather(
            *(gateway.append(lane, b"%d" % number) for lane in flood for number in range(begin, begin + 50))
        )
    started: list[Delivery] = []
    rooms = [Room(1), Room(1)]
    held: tuple[list[str], list[str]] = ([], [])
    workers = [await connect(nats_url, name=f"w{number}") for number in range(2)]
    async with (
        _pulling(workers[0], rooms[0], started, held[0], "w0"),
        _pulling(workers[1], rooms[1], started, held[1], "w1"),
    ):
        await until(lambda: len(started) == 2)
        await gateway.append(newcomer, b"first")
        for step in range(12):
            await started[step].ack()
            place = 0 if (held[0] and step % 2 == 0) or not held[1] else 1
            rooms[place].give_back(held[place].pop(0))
            await until(lambda step=step: len(started) >= step + 3)
        order = [delivery.message.subject for delivery in started]
        assert newcomer in order[2:8]
        assert min(order.count(lane) for lane in flood) >= 4
    for transport in (gateway, *workers):
        await transport.close()
