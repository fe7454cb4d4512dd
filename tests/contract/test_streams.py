"""Streams: what was appended is there once and in order, fences hold, limits refuse. For NATS and for its twin in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.errors import Conflict, FencedOut, Overloaded, PayloadTooLarge, Unavailable
from shared.transport.base import Transport
from tests.contract.transport import PATIENCE_S, World


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


async def test_a_look_goes_before_what_is_sent_after_it_and_is_answered_later(world: World) -> None:
    spec = world.stream()
    await world.transport.ensure_stream(spec)
    nothing = await world.transport.look(spec.name, world.subject("a"))
    assert await nothing.found() is None
    await world.transport.append(world.subject("a"), b"1", headers={"h": "v"})
    looking = await world.transport.look(spec.name, world.subject("a"))
    dropped = await world.transport.look(spec.name, world.subject("a"))
    await world.transport.append(world.subject("b"), b"2")
    assert await looking.found() == await world.transport.last(spec.name, world.subject("a"))
    dropped.drop()
    dropped.drop()
    looking.drop()


async def test_a_look_into_no_stream_fails(world: World) -> None:
    with pytest.raises(Unavailable):
        await (await world.transport.look("T_NOWHERE", world.subject())).found()


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


@pytest.mark.parametrize("expectation", [{"message_id": "m" * 32}, {"expected_last_subject_sequence": 0}, {}])
async def test_fr_94_the_headers_of_an_append_count_too(world: World, expectation: dict[str, Any]) -> None:
    """A message that they bring over the limit would cost the connection, and all that goes over it."""
    limit = world.transport.max_payload_bytes
    await world.transport.ensure_stream(world.stream(max_msg_bytes=limit, max_bytes=4 * limit))
    with pytest.raises(PayloadTooLarge):
        await world.transport.append(world.subject(), b"x" * limit, **expectation)
    stored = await world.transport.append(world.subject(), b"x" * (limit - 128), **expectation)
    assert stored.sequence == 1


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
