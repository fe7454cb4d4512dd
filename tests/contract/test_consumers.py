"""Pull consumers: each delivery goes to one, until it is acknowledged. For NATS and for its twin in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shared.errors import Conflict, Unavailable
from tests.contract.transport import PATIENCE_S, World, fetch


async def test_fetch_delivers_in_order_and_ack_removes_from_a_work_queue(world: World) -> None:
    spec = world.stream(work_queue=True)
    await world.transport.ensure_stream(spec)
    consumer = await world.transport.ensure_consumer(world.consumer())
    for index in range(6):
        await world.transport.append(world.subject(), b"%d" % index, headers={"h": "v"})
    assert await consumer.pending() == 6
    deliveries = await fetch(consumer, 6)
    assert [one.message.data for one in deliveries] == [b"%d" % i for i in range(6)]
    assert {one.delivery_count for one in deliveries} == {1}
    assert deliveries[0].message.headers == {"h": "v"}
    assert (
        deliveries[0].message.sequence == (await world.transport.read(spec.name, world.subject()))[0].sequence
    )
    assert await consumer.pending() == 0
    for delivery in deliveries:
        await delivery.ack()
    assert await world.transport.read(spec.name, world.subject()) == []


async def test_fetch_returns_nothing_after_its_timeout(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    consumer = await world.transport.ensure_consumer(world.consumer())
    for limit in (1, 8):
        async with asyncio.timeout(PATIENCE_S):
            assert await consumer.fetch(limit=limit, timeout=0.2) == []


async def test_a_waiting_fetch_gets_a_message_that_comes_later(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    consumer = await world.transport.ensure_consumer(world.consumer())
    waiting = asyncio.create_task(consumer.fetch(limit=4, timeout=PATIENCE_S))
    await asyncio.sleep(0)
    await world.transport.append(world.subject(), b"late")
    assert [one.message.data for one in await waiting] == [b"late"]


async def test_two_connections_never_get_the_same_delivery(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    consumers = [await (await world.open()).ensure_consumer(world.consumer()) for _ in range(2)]
    for index in range(20):
        await world.transport.append(world.subject(), b"%d" % index)
    batches = await asyncio.gather(*(one.fetch(limit=10, timeout=PATIENCE_S) for one in consumers))
    seen = [one.message.data for batch in batches for one in batch]
    assert len(seen) == len(set(seen))


async def test_what_a_cancelled_fetch_was_given_comes_again(world: World) -> None:
    stream = world.stream(work_queue=True)
    await world.transport.ensure_stream(stream)
    consumer = await world.transport.ensure_consumer(world.consumer(ack_wait_s=0.5))
    waiting = asyncio.create_task(consumer.fetch(limit=1, timeout=PATIENCE_S))
    for _ in range(2):  # the server hears a connection in order: after these answers it has heard the fetch
        await world.transport.ensure_stream(stream)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await world.transport.append(world.subject(), b"x")
    (delivery,) = await fetch(consumer)
    assert delivery.message.data == b"x"


async def test_fr_97_no_ack_within_the_wait_means_another_delivery(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    consumer = await world.transport.ensure_consumer(world.consumer(ack_wait_s=0.3))
    await world.transport.append(world.subject(), b"x")
    (first,) = await fetch(consumer)
    (second,) = await fetch(consumer)
    assert (first.delivery_count, second.delivery_count) == (1, 2)
    assert first.message == second.message
    await second.ack()
    assert await consumer.fetch(limit=1, timeout=0.5) == []


async def test_fr_97_progress_restarts_the_wait(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    consumer = await world.transport.ensure_consumer(world.consumer(ack_wait_s=1.5))
    await world.transport.append(world.subject(), b"x")
    (delivery,) = await fetch(consumer)
    for _ in range(5):
        assert await consumer.fetch(limit=1, timeout=0.5) == []
        await delivery.progress()
    await delivery.ack()
    assert await consumer.fetch(limit=1, timeout=1.0) == []


async def test_nak_hands_back_at_once_or_after_a_delay(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    consumer = await world.transport.ensure_consumer(world.consumer())
    await world.transport.append(world.subject(), b"x")
    (delivery,) = await fetch(consumer)
    await delivery.nak()
    (delivery,) = await fetch(consumer)
    assert delivery.delivery_count == 2
    await delivery.nak(delay_s=0.7)
    assert await consumer.fetch(limit=1, timeout=0.2) == []
    (delivery,) = await fetch(consumer)
    assert delivery.delivery_count == 3
    await delivery.term()
    assert await consumer.fetch(limit=1, timeout=0.2) == []


@pytest.mark.parametrize("end", ["ack", "nak", "term"])
async def test_a_delivery_is_ended_once(world: World, end: str) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    consumer = await world.transport.ensure_consumer(world.consumer())
    await world.transport.append(world.subject(), b"x")
    (delivery,) = await fetch(consumer)
    await getattr(delivery, end)()
    with pytest.raises(RuntimeError):
        await delivery.ack()


async def test_max_ack_pending_bounds_what_is_out(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    consumer = await world.transport.ensure_consumer(world.consumer(max_ack_pending=2))
    for index in range(4):
        await world.transport.append(world.subject(), b"%d" % index)
    out = await fetch(consumer, 2)
    assert await consumer.fetch(limit=4, timeout=0.2) == []
    await out[0].ack()
    assert [one.message.data for one in await fetch(consumer)] == [b"2"]


async def test_a_durable_consumer_outlives_its_connection(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    first = await world.open()
    consumer = await first.ensure_consumer(world.consumer())
    await world.transport.append(world.subject(), b"a")
    await world.transport.append(world.subject(), b"b")
    (delivery,) = await fetch(consumer)
    await delivery.ack()
    await first.close()
    again = await world.transport.ensure_consumer(world.consumer())
    assert [one.message.data for one in await fetch(again)] == [b"b"]


async def test_overlapping_filters_in_a_work_queue_conflict(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    await world.transport.ensure_consumer(world.consumer())
    with pytest.raises(Conflict):
        await world.transport.ensure_consumer(
            world.consumer(durable="other", filter_subject=world.subject("a"))
        )


async def test_a_consumer_of_a_plain_stream_leaves_the_messages(world: World) -> None:
    spec = world.stream()
    await world.transport.ensure_stream(spec)
    await world.transport.append(world.subject(), b"before")
    consumer = await world.transport.ensure_consumer(world.consumer())
    (delivery,) = await fetch(consumer)
    await delivery.ack()
    assert len(await world.transport.read(spec.name, world.subject())) == 1


async def test_close_is_idempotent_and_ends_readers(world: World) -> None:
    transport = await world.open()
    subscription = await transport.subscribe(world.subject())

    async def drain() -> int:
        return len([message async for message in subscription])

    reading = asyncio.create_task(drain())
    await asyncio.sleep(0)
    assert await transport.ready()
    await transport.close()
    await transport.close()
    async with asyncio.timeout(PATIENCE_S):
        assert await reading == 0
    assert not await transport.ready()
    with pytest.raises(Unavailable):
        await transport.publish(world.subject(), b"x")


async def test_a_closed_consumer_leaves_the_durable_and_another_goes_on(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    spec = world.consumer()
    first = await world.transport.ensure_consumer(spec)
    await world.transport.append(world.subject(), b"1")
    (delivery,) = await fetch(first)
    await first.close()
    await first.close()
    await delivery.ack()
    await world.transport.append(world.subject(), b"2")
    (delivery,) = await fetch(await world.transport.ensure_consumer(spec))
    assert delivery.message.data == b"2"
    await delivery.ack()


async def test_a_stream_that_says_so_has_more_consumers_than_a_server_gives_by_itself(world: World) -> None:
    """Each tenant has a durable of its own: at the server's default of 1,000 the next one was never served."""
    tenants = 1001
    spec = world.stream(work_queue=True)
    await world.transport.ensure_stream(spec)  # as an earlier release made it
    await world.transport.ensure_stream(replace(spec, max_consumers=2000))
    lanes = [world.consumer(durable=f"lane{i}", filter_subject=world.subject(str(i))) for i in range(tenants)]
    await world.transport.append(lanes[-1].filter_subject, b"hello")
    for first in range(0, tenants - 1, 50):
        await asyncio.gather(*(world.transport.take(lane) for lane in lanes[first : first + 50]))
    delivery = await world.transport.take(lanes[-1])
    assert delivery is not None
    assert delivery.message.data == b"hello"
