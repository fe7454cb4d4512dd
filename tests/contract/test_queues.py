"""Many queues in one stream: looking, taking, bells, groups, reading over them. For NATS and for its twin in memory."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import Conflict, NotFound
from tests.contract.transport import PATIENCE_S, World, fetch, until_taken


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
