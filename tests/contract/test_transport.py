"""The transport's contract, for NATS and for its twin in memory."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import pytest

from shared.errors import Conflict, FencedOut, NotFound, Overloaded, PayloadTooLarge, Unavailable
from shared.protocol.subjects import ConsumerSpec, StreamSpec
from shared.transport.base import Delivery, PullConsumer, Received, Transport
from shared.transport.memory import MemoryServer
from shared.transport.nats import connect

Opener = Callable[[], Awaitable[Transport]]
PATIENCE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class World:
    """One server, a prefix of subjects that is this test's own, and a first connection."""

    open: Opener
    prefix: str
    transport: Transport

    def stream(self, *, work_queue: bool = False, **changes: object) -> StreamSpec:
        spec = StreamSpec(
            name=f"T_{self.prefix}",
            subjects=(f"{self.prefix}.>",),
            work_queue=work_queue,
            max_bytes=1 << 20,
            max_age_s=3600,
            max_msg_bytes=1 << 16,
            max_msgs_per_subject=-1,
            duplicate_window_s=60,
        )
        return replace(spec, **changes)

    def consumer(self, **changes: object) -> ConsumerSpec:
        spec = ConsumerSpec(
            stream=f"T_{self.prefix}",
            durable="pull",
            filter_subject=f"{self.prefix}.*",
            ack_wait_s=30.0,
            max_ack_pending=64,
        )
        return replace(spec, **changes)

    def subject(self, token: str = "a") -> str:
        return f"{self.prefix}.{token}"


@pytest.fixture(params=["memory", "nats"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    opened: list[Transport] = []
    server = MemoryServer()
    url = request.getfixturevalue("session_nats_url") if request.param == "nats" else ""

    async def open_() -> Transport:
        opened.append(await connect(url, name="contract") if url else server.transport())
        return opened[-1]

    yield World(open=open_, prefix=secrets.token_hex(6), transport=await open_())
    for transport in opened:
        await transport.close()


async def fetch(consumer: PullConsumer, count: int = 1) -> list[Delivery]:
    """Exactly `count` deliveries, within the test's patience."""
    found: list[Delivery] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            found.extend(await consumer.fetch(limit=count - len(found), timeout=1.0))
    return found


async def echo(message: Received) -> bytes:
    return b"re:" + message.data


# ---- core ------------------------------------------------------------------------------------------------------------


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


# ---- streams ---------------------------------------------------------------------------------------------------------


async def test_append_stores_and_reads_back(world: World) -> None:
    spec = world.stream()
    await world.transport.ensure_stream(spec)
    stored = [
        await world.transport.append(world.subject("a"), b"%d" % i, headers={"h": "v"}) for i in range(5)
    ]
    await world.transport.append(world.subject("b"), b"other")
    assert [one.duplicate for one in stored] == [False] * 5
    sequences = [one.sequence for one in stored]
    assert sequences == sorted(set(sequences))
    found = await world.transport.read(spec.name, world.subject("a"))
    assert [(one.data, one.sequence, one.subject) for one in found] == [
        (b"%d" % i, sequences[i], world.subject("a")) for i in range(5)
    ]
    assert found[0].headers == {"h": "v"}
    assert await world.transport.last(spec.name, world.subject("a")) == found[-1]
    assert await world.transport.read(spec.name, world.subject("a"), after=sequences[2]) == found[3:]
    assert (
        await world.transport.read(spec.name, world.subject("a"), after=sequences[0], limit=2) == found[1:3]
    )


async def test_reading_what_is_not_there(world: World) -> None:
    spec = world.stream()
    await world.transport.ensure_stream(spec)
    assert await world.transport.last(spec.name, world.subject()) is None
    assert await world.transport.read(spec.name, world.subject()) == []
    stored = await world.transport.append(world.subject(), b"x")
    assert await world.transport.read(spec.name, world.subject(), after=stored.sequence) == []
    with pytest.raises(Unavailable):
        await world.transport.last("T_NOWHERE", world.subject())


async def test_append_without_a_stream_is_unavailable(world: World) -> None:
    with pytest.raises(Unavailable):
        await world.transport.append(world.subject(), b"x", timeout=1.0)


async def test_fence_refuses_a_stale_expectation(world: World) -> None:
    spec = world.stream()
    await world.transport.ensure_stream(spec)
    first = await world.transport.append(world.subject(), b"a", expected_last_subject_sequence=0)
    await world.transport.append(world.subject("other"), b"z", expected_last_subject_sequence=0)
    with pytest.raises(FencedOut):
        await world.transport.append(world.subject(), b"b", expected_last_subject_sequence=0)
    second = await world.transport.append(
        world.subject(), b"b", expected_last_subject_sequence=first.sequence
    )
    with pytest.raises(FencedOut):
        await world.transport.append(world.subject(), b"c", expected_last_subject_sequence=first.sequence)
    assert second.sequence > first.sequence
    assert [one.data for one in await world.transport.read(spec.name, world.subject())] == [b"a", b"b"]


async def test_fence_lets_exactly_one_of_many_through(world: World) -> None:
    await world.transport.ensure_stream(world.stream())
    others = [await world.open() for _ in range(4)]

    async def claim(transport: Transport, who: int) -> bool:
        try:
            await transport.append(world.subject(), b"%d" % who, expected_last_subject_sequence=0)
        except FencedOut:
            return False
        return True

    assert sum(await asyncio.gather(*(claim(one, who) for who, one in enumerate(others)))) == 1


async def test_the_same_append_again_is_a_duplicate_not_a_fence(world: World) -> None:
    spec = world.stream()
    await world.transport.ensure_stream(spec)
    first = await world.transport.append(world.subject(), b"a", expected_last_subject_sequence=0)
    again = await world.transport.append(world.subject(), b"a", expected_last_subject_sequence=0)
    assert (again.sequence, again.duplicate) == (first.sequence, True)
    await world.transport.append(world.subject(), b"b", expected_last_subject_sequence=first.sequence)
    again = await world.transport.append(world.subject(), b"a", expected_last_subject_sequence=0)
    assert (again.sequence, again.duplicate) == (first.sequence, True)
    assert len(await world.transport.read(spec.name, world.subject())) == 2


async def test_a_refused_append_still_reaches_plain_subscribers(world: World) -> None:
    await world.transport.ensure_stream(world.stream())
    await world.transport.append(world.subject(), b"a", expected_last_subject_sequence=0)
    subscription = await world.transport.subscribe(world.subject())
    with pytest.raises(FencedOut):
        await world.transport.append(world.subject(), b"refused", expected_last_subject_sequence=0)
    heard = await subscription.next(PATIENCE_S)
    assert heard is not None
    assert heard.data == b"refused"


async def test_fr_98_a_message_id_is_stored_once_in_the_window(world: World) -> None:
    spec = world.stream()
    await world.transport.ensure_stream(spec)
    first = await world.transport.append(world.subject(), b"a", message_id="id-1")
    again = await world.transport.append(world.subject(), b"b", message_id="id-1")
    assert (again.sequence, again.duplicate) == (first.sequence, True)
    assert not (await world.transport.append(world.subject(), b"c", message_id="id-2")).duplicate
    assert [one.data for one in await world.transport.read(spec.name, world.subject())] == [b"a", b"c"]


async def test_fr_100_a_full_stream_refuses_and_keeps_what_it_acknowledged(world: World) -> None:
    spec = world.stream(max_bytes=64_000)
    await world.transport.ensure_stream(spec)
    kept = 0

    async def fill() -> None:
        nonlocal kept
        while kept < 200:
            await world.transport.append(world.subject(), b"x" * 1000)
            kept += 1

    with pytest.raises(Overloaded) as caught:
        await fill()
    assert caught.value.retry_after_s >= 1
    assert 0 < kept < 80
    assert len(await world.transport.read(spec.name, world.subject())) == kept
    await world.transport.purge(spec.name, world.subject())
    await world.transport.append(world.subject(), b"x")


async def test_a_message_over_the_streams_own_limit_is_too_large(world: World) -> None:
    await world.transport.ensure_stream(world.stream(max_msg_bytes=1000))
    with pytest.raises(PayloadTooLarge):
        await world.transport.append(world.subject(), b"x" * 2000)


async def test_a_limit_per_subject_keeps_the_newest(world: World) -> None:
    spec = world.stream(max_msgs_per_subject=1)
    await world.transport.ensure_stream(spec)
    for data in (b"a", b"b", b"c"):
        await world.transport.append(world.subject(), data)
    assert [one.data for one in await world.transport.read(spec.name, world.subject())] == [b"c"]


async def test_purge_deletes_one_subject_alone(world: World) -> None:
    spec = world.stream()
    await world.transport.ensure_stream(spec)
    await world.transport.append(world.subject("a"), b"a")
    await world.transport.append(world.subject("b"), b"b")
    await world.transport.purge(spec.name, world.subject("a"))
    assert await world.transport.last(spec.name, world.subject("a")) is None
    assert await world.transport.last(spec.name, world.subject("b")) is not None


async def test_purge_may_keep_the_newest(world: World) -> None:
    spec = world.stream()
    await world.transport.ensure_stream(spec)
    for data in (b"a", b"b", b"c"):
        last = await world.transport.append(world.subject(), data)
    for keep in (5, 1):  # more than there are, then fewer
        await world.transport.purge(spec.name, world.subject(), keep=keep)
    kept = await world.transport.read(spec.name, world.subject())
    assert [(one.data, one.sequence) for one in kept] == [(b"c", last.sequence)]
    with pytest.raises(FencedOut):
        await world.transport.append(world.subject(), b"d", expected_last_subject_sequence=0)


async def test_ensure_stream_is_idempotent_from_many_at_once_and_takes_new_limits(world: World) -> None:
    others = [await world.open() for _ in range(3)]
    await asyncio.gather(*(one.ensure_stream(world.stream()) for one in others))
    await world.transport.append(world.subject(), b"kept")
    await world.transport.ensure_stream(world.stream(max_msg_bytes=100))
    with pytest.raises(PayloadTooLarge):
        await world.transport.append(world.subject(), b"x" * 200)
    assert await world.transport.last(world.stream().name, world.subject()) is not None


async def test_ensure_stream_names_the_field_that_cannot_change(world: World) -> None:
    await world.transport.ensure_stream(world.stream())
    with pytest.raises(Conflict, match="retention"):
        await world.transport.ensure_stream(world.stream(work_queue=True))


# ---- consumers -------------------------------------------------------------------------------------------------------


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
    await world.transport.ensure_stream(world.stream(work_queue=True))
    consumer = await world.transport.ensure_consumer(world.consumer(ack_wait_s=0.5))
    waiting = asyncio.create_task(consumer.fetch(limit=1, timeout=PATIENCE_S))
    await asyncio.sleep(0.05)  # it must have asked the server
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


# ---- many queues: looking, taking, bells -----------------------------------------------------------------------------


async def test_take_gives_one_message_or_none_and_makes_the_consumer(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    spec = world.consumer(durable="lane-a", filter_subject=world.subject("a"))
    assert await world.transport.take(spec) is None
    for data in (b"1", b"2"):
        await world.transport.append(world.subject("a"), data, headers={"h": "v"})
    other = await world.open()
    first, second = await world.transport.take(spec), await other.take(spec)
    assert first is not None
    assert second is not None
    assert (first.message.data, first.delivery_count, first.message.headers) == (b"1", 1, {"h": "v"})
    assert second.message.data == b"2"
    assert await other.take(spec) is None
    await first.ack()
    await second.nak()
    again = await until_taken(world.transport, spec)
    assert (again.message.data, again.delivery_count) == (b"2", 2)
    await again.ack()
    assert await world.transport.waiting(spec.stream, f"{world.prefix}.>") == {}


async def test_waiting_counts_by_subject_what_is_not_acknowledged(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    for token in ("a", "b", "a"):
        await world.transport.append(world.subject(token), b"x")
    spec = world.consumer(durable="lane-a", filter_subject=world.subject("a"))
    taken = await until_taken(world.transport, spec)
    both = {world.subject("a"): 2, world.subject("b"): 1}
    assert await world.transport.waiting(spec.stream, f"{world.prefix}.>") == both
    await taken.ack()
    only = await world.transport.waiting(spec.stream, world.subject("a"))
    assert only == {world.subject("a"): 1}


async def test_a_bell_tells_of_every_stored_message_and_carries_none(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True, bells=f"bell{world.prefix}"))
    bells = await (await world.open()).subscribe(f"bell{world.prefix}.>")
    await world.transport.append(world.subject("a"), b"body", message_id="one")
    await world.transport.append(world.subject("a"), b"body", message_id="one")  # a duplicate is not stored
    await world.transport.append(world.subject("b"), b"body")
    heard = [await bells.next(PATIENCE_S), await bells.next(PATIENCE_S)]
    assert [one and (one.subject, one.data) for one in heard] == [
        (f"bell{world.prefix}.a", b""),
        (f"bell{world.prefix}.b", b""),
    ]
    assert await bells.next(0.05) is None


async def test_a_stream_that_had_no_bells_gets_them(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    await world.transport.ensure_stream(world.stream(work_queue=True, bells=f"bell{world.prefix}"))
    bells = await world.transport.subscribe(f"bell{world.prefix}.>")
    await world.transport.append(world.subject("a"), b"body")
    assert await bells.next(PATIENCE_S) is not None


async def test_in_a_group_who_waits_with_the_lower_number_goes_first(world: World) -> None:
    """A redelivery, which anybody may have: the owner waits for it, so nobody else gets it."""
    await world.transport.ensure_stream(world.stream(work_queue=True))
    spec = world.consumer(durable="to-w", filter_subject=world.subject("to"), group="spill")
    owner = await world.transport.ensure_consumer(spec)
    other = await world.open()
    assert await other.take(spec, priority=1) is None
    waiting = asyncio.create_task(fetch(owner))
    while not waiting.done():
        if not await world.transport.waiting(spec.stream, world.subject("to")):
            await world.transport.append(world.subject("to"), b"x")
        assert await other.take(spec, priority=1) is None
    (mine,) = await waiting
    assert mine.message.data == b"x"
    await world.transport.append(world.subject("to"), b"y")  # now the owner does not pull
    spilled = await until_taken(other, spec, priority=1)
    assert spilled.message.data == b"y"


async def test_what_a_dead_owner_held_is_taken_after_the_ack_wait(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    spec = world.consumer(durable="to-w", filter_subject=world.subject("to"), group="spill", ack_wait_s=0.5)
    owner = await world.transport.ensure_consumer(spec)
    await world.transport.append(world.subject("to"), b"x")
    await fetch(owner)
    other = await world.open()
    assert await other.take(spec, priority=1) is None
    taken = await until_taken(other, spec, priority=1)
    assert (taken.message.data, taken.delivery_count) == (b"x", 2)


async def test_a_dropped_consumer_leaves_its_messages_and_its_place(world: World) -> None:
    await world.transport.ensure_stream(world.stream(work_queue=True))
    await world.transport.ensure_consumer(world.consumer(durable="all", filter_subject=world.subject("*")))
    await world.transport.append(world.subject("a"), b"x")
    lane = world.consumer(durable="lane-a", filter_subject=world.subject("a"))
    with pytest.raises(Conflict):
        await world.transport.take(lane)
    for _ in range(2):
        await world.transport.drop_consumer(lane.stream, "all")
    assert (await until_taken(world.transport, lane)).message.data == b"x"


async def test_delete_takes_one_message_out(world: World) -> None:
    spec = world.stream()
    await world.transport.ensure_stream(spec)
    first, second = [await world.transport.append(world.subject(), data) for data in (b"1", b"2")]
    await world.transport.delete(spec.name, first.sequence)
    (left,) = await world.transport.read(spec.name, world.subject())
    assert left.sequence == second.sequence
    with pytest.raises(NotFound):
        await world.transport.delete(spec.name, first.sequence)


async def test_a_pattern_reads_over_subjects(world: World) -> None:
    spec = world.stream()
    await world.transport.ensure_stream(spec)
    stored = [await world.transport.append(world.subject(token), token.encode()) for token in "abc"]
    found = await world.transport.read(spec.name, world.subject("*"), after=stored[0].sequence, limit=5)
    assert [(one.subject, one.data) for one in found] == [(world.subject(t), t.encode()) for t in "bc"]


async def until_taken(transport: Transport, spec: ConsumerSpec, *, priority: int = 0) -> Delivery:
    """A message, within the test's patience."""
    async with asyncio.timeout(PATIENCE_S):
        while (taken := await transport.take(spec, priority=priority)) is None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    return taken
