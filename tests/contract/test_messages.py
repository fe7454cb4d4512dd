"""Messages that nobody keeps: subscriptions, requests and services. For NATS and for its twin in memory."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import PayloadTooLarge, Unavailable
from shared.transport.base import Received
from tests.contract.transport import PATIENCE_S, World


async def echo(message: Received) -> bytes:
    return b"re:" + message.data


async def test_subscriber_hears_what_is_published_after_subscribe(world: World) -> None:
    """The subscription is at the server when `subscribe` returns: another connection's publish is not missed."""
    other = await world.open()
    for index in range(20):
        subscription = await world.transport.subscribe(world.subject(f"n{index}"))
        await other.publish(world.subject(f"n{index}"), b"x", {"traceparent": "00-1"})
        message = await subscription.next(PATIENCE_S)
        assert message == Received(
            subject=world.subject(f"n{index}"), data=b"x", headers={"traceparent": "00-1"}, sequence=0
        )
        await subscription.close()


async def test_an_unsettled_subscription_hears_what_comes_of_a_later_message_of_its_connection(
    world: World,
) -> None:
    """Another connection answers at once what the subscriber asks: its answer finds the subscription there."""
    other = await world.open()

    async def answer(message: Received) -> bytes:
        await other.publish(message.data.decode(), b"live")
        return b""

    await other.serve(world.subject("ask"), "q", answer, concurrency=4)
    for index in range(20):
        subject = world.subject(f"n{index}")
        subscription = await world.transport.subscribe(subject, settled=False)
        await world.transport.request(world.subject("ask"), subject.encode(), timeout=PATIENCE_S)
        message = await subscription.next(PATIENCE_S)
        assert message is not None
        assert message.data == b"live"
        await subscription.close()


async def test_next_returns_none_after_its_timeout(world: World) -> None:
    subscription = await world.transport.subscribe(world.subject())
    assert await subscription.next(0.05) is None


async def test_messages_come_in_order_and_iteration_ends_at_close(world: World) -> None:
    subscription = await world.transport.subscribe(world.subject("*"))
    for index in range(50):
        await world.transport.publish(world.subject(f"{index % 3}"), b"%d" % index)
    seen: list[bytes] = []
    async for message in subscription:
        seen.append(message.data)
        if len(seen) == 50:
            await subscription.close()
    assert seen == [b"%d" % index for index in range(50)]
    with pytest.raises(Unavailable):
        await subscription.next(0.05)


async def test_wildcards_match_by_token(world: World) -> None:
    one = await world.transport.subscribe(f"{world.prefix}.*")
    rest = await world.transport.subscribe(f"{world.prefix}.>")
    await world.transport.publish(f"{world.prefix}.a.b", b"deep")
    await world.transport.publish(f"{world.prefix}.a", b"flat")
    first, second = await rest.next(PATIENCE_S), await rest.next(PATIENCE_S)
    assert first is not None
    assert second is not None
    assert [first.data, second.data] == [b"deep", b"flat"]
    flat = await one.next(PATIENCE_S)
    assert flat is not None
    assert flat.data == b"flat"


async def test_fr_104_a_slow_reader_loses_messages_and_sees_it(world: World) -> None:
    subscription = await world.transport.subscribe(world.subject())
    payload = b"x" * 60_000
    for _ in range(400):  # 24 MB into a buffer of 16
        await world.transport.publish(world.subject(), payload)
    async with asyncio.timeout(PATIENCE_S):
        while not subscription.dropped:
            await world.transport.ready()
    assert await subscription.next(PATIENCE_S) is not None


async def test_fr_94_a_payload_over_the_limit_is_refused_before_it_is_sent(world: World) -> None:
    limit = world.transport.max_payload_bytes
    subscription = await world.transport.subscribe(world.subject())
    for send in (world.transport.publish, world.transport.append):
        with pytest.raises(PayloadTooLarge):
            await send(world.subject(), b"x" * (limit + 1))
        with pytest.raises(PayloadTooLarge):  # headers count
            await send(world.subject(), b"x" * limit, headers={"a": "b"})
    await world.transport.publish(world.subject(), b"x" * limit)
    message = await subscription.next(PATIENCE_S)
    assert message is not None
    assert len(message.data) == limit


async def test_request_is_answered(world: World) -> None:
    server = await world.open()
    await server.serve(world.subject("*"), "q", echo, concurrency=2)
    answers = await asyncio.gather(
        *(world.transport.request(world.subject("a"), b"%d" % i, timeout=PATIENCE_S) for i in range(20))
    )
    assert answers == [b"re:%d" % i for i in range(20)]


async def test_request_without_a_responder_is_unavailable_at_once(world: World) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(Unavailable):
            await world.transport.request(world.subject(), b"", timeout=60.0)


async def test_request_without_an_answer_is_unavailable_after_its_timeout(world: World) -> None:
    never = asyncio.Event()

    async def hang(message: Received) -> bytes:
        await never.wait()
        return b""

    await world.transport.serve(world.subject(), "q", hang, concurrency=1)
    with pytest.raises(Unavailable):
        await world.transport.request(world.subject(), b"", timeout=0.1)
    never.set()


async def test_a_failing_handler_is_told_to_the_caller_and_the_service_goes_on(world: World) -> None:
    async def sometimes(message: Received) -> bytes:
        if message.data == b"bad":
            raise KeyError("secret")
        return b"good"

    await world.transport.serve(world.subject(), "q", sometimes, concurrency=1)
    with pytest.raises(Unavailable) as caught:
        await world.transport.request(world.subject(), b"bad", timeout=PATIENCE_S)
    assert "secret" not in str(caught.value)
    assert await world.transport.request(world.subject(), b"", timeout=PATIENCE_S) == b"good"


async def test_a_service_runs_at_most_its_concurrency(world: World) -> None:
    running = most = 0

    async def count(message: Received) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return b""

    await world.transport.serve(world.subject(), "q", count, concurrency=3)
    calls = (world.transport.request(world.subject(), b"", timeout=PATIENCE_S) for _ in range(30))
    await asyncio.gather(*calls)
    assert most <= 3


async def test_a_queue_group_shares_requests(world: World) -> None:
    async def by(name: bytes) -> None:
        async def handler(message: Received) -> bytes:
            return name

        await world.transport.serve(world.subject(), "q", handler, concurrency=1)

    await by(b"one")
    await by(b"two")
    answers = {await world.transport.request(world.subject(), b"", timeout=PATIENCE_S) for _ in range(60)}
    assert answers == {b"one", b"two"}
