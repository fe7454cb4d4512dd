"""Dead letters: what is kept of a request, and what requeueing makes of it."""

from __future__ import annotations

import msgspec
import pytest

from services import dead_letters
from shared.clock import ManualClock
from shared.errors import Conflict, NotFound
from shared.protocol import codec, subjects
from shared.protocol.messages import ClaimCheck, GenerateRequest
from shared.transport import bodies
from shared.transport.memory import MemoryServer, MemoryTransport
from tests.unit.services.gpu_worker.rig import make_request, world
from tests.unit.services.gpu_worker.scripted import FINGERPRINT


async def _transport() -> MemoryTransport:
    transport = MemoryServer().transport()
    for spec in subjects.STREAMS:
        await transport.ensure_stream(spec)
    return transport


async def _bury(transport: MemoryTransport, data: bytes, reason: str = "poison") -> int:
    headers = {subjects.DEAD_REASON: reason, "traceparent": "00-1"}
    return (await transport.append(subjects.dead(FINGERPRINT), data, headers=headers)).sequence


async def test_a_list_tells_who_and_why_and_never_what() -> None:
    transport = await _transport()
    first = await _bury(transport, codec.encode(make_request("r1")))
    second = await _bury(transport, b"noise", "unreadable")
    rows = [dead_letters.row(one) for one in await dead_letters.letters(transport, limit=10)]
    assert [row[:2] for row in rows] == [(first, "poison"), (second, "unreadable")]
    assert rows[0][2:5] == ("r1", "t", "m")
    assert len(await dead_letters.letters(transport, limit=1)) == 1
    shown = dict(dead_letters.fields(await dead_letters.letter(transport, first), tokens=False))
    assert shown["prompt tokens"] == 200
    assert "prompt" not in shown
    assert dict(dead_letters.fields(await dead_letters.letter(transport, first), tokens=True))["prompt"]
    with pytest.raises(NotFound):
        await dead_letters.letter(transport, 77)


async def test_a_grammar_is_told_only_with_the_prompt() -> None:
    transport = await _transport()
    request = msgspec.structs.replace(make_request("r1"), grammar='start: "secret"')
    one = await dead_letters.letter(transport, await _bury(transport, codec.encode(request)))
    assert "secret" not in repr(dead_letters.fields(one, tokens=False))
    assert dict(dead_letters.fields(one, tokens=True))["grammar"] == 'start: "secret"'


async def test_requeue_makes_one_new_request_however_often_it_is_asked_for() -> None:
    transport, clock = await _transport(), ManualClock()
    place = await _bury(transport, codec.encode(make_request("r1", priority="low")))
    kept = await dead_letters.letter(transport, place)
    made = await dead_letters.requeue(transport, clock, place, deadline_s=60)
    with pytest.raises(NotFound):
        await dead_letters.requeue(transport, clock, place, deadline_s=60)
    await transport.append(
        subjects.request_shared(FINGERPRINT, "low", "t"), kept.stored.data, message_id=made
    )
    spec = subjects.work_consumer(subjects.request_shared(FINGERPRINT, "low", "t"), ack_wait_s=15)
    work = await transport.take(spec)
    assert work is not None
    request = codec.decode_as(GenerateRequest, work.message.data)
    assert (request.request_id, made) == (f"r1-re{place}",) * 2
    assert request.deadline_ns == clock.wall_ns() + 60 * 10**9
    assert subjects.DEAD_REASON not in work.message.headers
    assert await transport.take(spec) is None


async def test_what_cannot_be_read_is_not_requeued_and_can_be_dropped() -> None:
    transport = await _transport()
    place = await _bury(transport, b"noise")
    with pytest.raises(Conflict):
        await dead_letters.requeue(transport, ManualClock(), place, deadline_s=60)
    await dead_letters.drop(transport, place)
    assert await dead_letters.letters(transport, limit=10) == []
    with pytest.raises(NotFound):
        await dead_letters.drop(transport, place)


async def test_a_letter_by_claim_check_is_requeued_with_its_prompt() -> None:
    transport = MemoryServer(max_payload_bytes=8000).transport()
    for spec in subjects.STREAMS:
        await transport.ensure_stream(spec)
    request = make_request("big", prompt=b"abcd" * 4000)
    place = await _bury(transport, await bodies.pack(transport, request, {}, most_bytes=1 << 20, timeout=5))
    assert dead_letters.row(await dead_letters.letter(transport, place))[-1] == 4000
    made = await dead_letters.requeue(transport, ManualClock(), place, deadline_s=60)
    work = await transport.take(
        subjects.work_consumer(subjects.request_shared(FINGERPRINT, "normal", "t"), ack_wait_s=15)
    )
    assert work is not None
    again = await bodies.redeem(transport, codec.decode_as(ClaimCheck, work.message.data))
    assert (again.request_id, again.prompt) == (made, request.prompt)


def test_ids_of_later_lives_stay_subject_tokens() -> None:
    once = dead_letters.again("r" * 64, 12345)
    assert len(once) == 64
    assert dead_letters.again(once, 7).endswith("-re7")
    assert dead_letters.again("r1-re5", 7) == "r1-re7"
    subjects.tokens(dead_letters.again(once, 10**12))


async def test_r_7_poison_becomes_a_letter_that_an_operator_requeues_and_it_is_answered() -> None:
    async with world() as here:
        for number in range(3):
            dying = await here.worker(f"w{number}", budget=1)
            if number == 0:
                await here.enqueue(make_request(clock=here.clock))
            else:
                here.clock.advance(16)
            await _claimed(here, number + 1)
            await dying.die()
        here.clock.advance(16)
        await here.worker("healthy")
        terminal = await here.terminal()
        assert terminal.failure is not None
        assert terminal.failure.code == "poison"
        (letter,) = await dead_letters.letters(here.transport, limit=5)
        assert letter.reason == "poison"
        made = await dead_letters.requeue(here.transport, here.clock, letter.place, deadline_s=60)
        again = await here.terminal(made)
        assert again.failure is None
        assert again.completion_tokens == 20
        assert await dead_letters.letters(here.transport, limit=5) == []


async def _claimed(here: object, attempts: int) -> None:
    from shared.protocol.messages import Started
    from tests.waiting import until

    async def claimed() -> bool:
        found = await here.journalled()  # type: ignore[attr-defined]
        return sum(isinstance(one, Started) for one in found) == attempts

    await until(claimed)
