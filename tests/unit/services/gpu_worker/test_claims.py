"""Who owns a request: fences, takeovers, redeliveries."""

from __future__ import annotations

import pytest

from services.gpu_worker import journal
from shared.protocol import codec, subjects
from shared.protocol.messages import Frame, Started, Terminal, unpack_tokens
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, make_request, until, world
from tests.unit.services.gpu_worker.scripted import FINGERPRINT, stream


async def test_fr_96_a_worker_that_lost_its_claim_publishes_nothing_more() -> None:
    async with world() as here:
        running = await here.worker(budget=3)
        await here.enqueue(make_request(clock=here.clock, max_tokens=40_000))
        await here.said(8)
        before = await here.journalled()
        last = await here.transport.last(subjects.JOURNAL.name, subjects.tokens("r1"))
        assert last is not None
        await here.claim(2, "thief", last.sequence)
        await running.let_go()
        await until(lambda: running.worker.room.taken == 0 and running.engine.at_baseline)
        after = await here.journalled()
        assert len(after) == len(before) + 1  # the other's claim alone
        assert running.engine.steps < 5000  # and the engine's work on it was ended
        assert here.waiting_items() == 1  # and nothing was acknowledged


async def test_c2_a_second_worker_goes_on_where_a_dead_one_stopped() -> None:
    async with world() as here:
        first = await here.worker("w1", budget=4)
        await here.enqueue(make_request(clock=here.clock, max_tokens=40))
        await here.said(12)
        await first.die()
        second = await here.worker("w2")
        here.clock.advance(16)  # the acknowledgement wait of the dead one is over
        terminal = await here.terminal()
        assert await here.tokens() == (stream(PROMPT, SEED, 40),)
        assert (terminal.attempt, terminal.worker_id) == (2, "w2")
        (resumed,) = second.engine.submitted
        assert resumed.emitted == stream(PROMPT, SEED, len(resumed.emitted))
        assert len(resumed.emitted) == 12
        assert (terminal.completion_tokens, terminal.ends[0].emitted_tokens) == (40, 40)
        assert resumed.max_tokens == 40  # FR-111: the budget is the whole request's
        await until(lambda: here.waiting_items() == 0)


async def test_fr_97_a_taker_that_dies_before_its_claim_costs_its_own_wait_and_no_more() -> None:
    """The claim tells which delivery it answers, so that the second loss can be seen in the journal."""
    async with world() as here:
        first = await here.worker("w1", budget=4)
        await here.enqueue(make_request(clock=here.clock, max_tokens=40))
        await here.said(12)
        await first.die()
        here.clock.advance(16)
        lane = subjects.request_shared(FINGERPRINT, "normal", "t")
        taken = await here.transport.take(subjects.work_consumer(lane, ack_wait_s=15.0))
        assert taken is not None  # and the taker is no more
        await here.worker("w3")
        here.clock.advance(16)
        terminal = await here.terminal()
        assert (terminal.attempt, terminal.worker_id) == (2, "w3")
        assert await here.tokens() == (stream(PROMPT, SEED, 40),)
        stored = await here.transport.read(subjects.JOURNAL.name, subjects.tokens("r1"))
        claims = [one for one in stored if isinstance(codec.decode(one.data), Started)]
        assert [one.headers[subjects.DELIVERY] for one in claims] == ["1", "3"]


async def test_c2_several_choices_are_resumed_each_at_its_own_offset() -> None:
    async with world() as here:
        first = await here.worker("w1", budget=3)
        await here.enqueue(make_request(clock=here.clock, choices=2, max_tokens=30))
        await here.said(16)
        await first.die()
        second = await here.worker("w2")
        here.clock.advance(16)
        await here.terminal()
        seeds = [one.sampling.seed for one in second.engine.submitted]
        assert await here.tokens(choices=2) == tuple(stream(PROMPT, seed, 30) for seed in seeds)


async def test_two_workers_that_begin_at_once_give_one_stream() -> None:
    """Both read an empty journal and claim attempt 1; the fence lets one through, whatever their message ids."""
    async with world() as here:
        one, two = await here.worker("w1"), await here.worker("w2")
        request = make_request(clock=here.clock, max_tokens=30)
        from tests.unit.services.gpu_worker.doubles import TwinDelivery

        data = codec.encode(request)
        for running in (one, two):
            delivery = TwinDelivery(data)
            assert running.worker.room.take(delivery.message.subject)
            running.worker.begin(delivery)
        await here.terminal()
        await until(lambda: one.worker.room.taken == 0 and two.worker.room.taken == 0)
        messages = await here.journalled()
        assert sum(isinstance(message, Terminal) for message in messages) == 1
        assert len({message.attempt for message in messages if isinstance(message, Started)}) == sum(
            isinstance(message, Started) for message in messages
        )
        assert await here.tokens() == (stream(PROMPT, SEED, 30),)
        await until(lambda: one.engine.at_baseline and two.engine.at_baseline)


async def test_a_finished_request_is_acknowledged_and_not_run_again() -> None:
    async with world() as here:
        request = make_request(clock=here.clock)
        first = await here.worker()
        await here.enqueue(request)
        await here.terminal()
        await until(lambda: here.waiting_items() == 0)
        await here.enqueue(request)  # a redelivery after a lost acknowledgement looks like this
        await until(lambda: here.waiting_items() == 0)
        assert len(first.engine.submitted) == 1
        await here.terminal()


async def test_fr_97_claims_are_kept_while_the_engine_works_and_left_when_it_stalls() -> None:
    async with world() as here:
        running = await here.worker(budget=2, settings={"stall_limit_s": 60.0})
        await here.enqueue(make_request(clock=here.clock))
        await here.said(4)
        for _ in range(3):
            here.clock.advance(5)
            await running.worker.keep_claims()
        durable = f"{FINGERPRINT[:16]}-normal-{subjects.lane('t')}"
        consumer = here.server.streams[subjects.REQUESTS.name].consumers[durable]
        assert consumer.take(1) == []  # 15 s are over, and the claim still holds
        here.clock.advance(61)  # no token in all that time
        await running.worker.keep_claims()
        assert running.core.metrics.stalls._value.get() == 1


async def test_a_redelivery_to_its_own_worker_is_adopted() -> None:
    async with world() as here:
        running = await here.worker(budget=2)
        await here.enqueue(make_request(clock=here.clock))
        await here.said(4)
        here.clock.advance(16)  # the claim was not kept in time: the queue delivers again, to the same worker
        (attempt,) = running.worker._reception.attempts.values()
        await until(lambda: attempt._item._delivery.delivery_count == 2)
        await running.let_go()
        terminal = await here.terminal()
        assert terminal.attempt == 1
        assert len(running.engine.submitted) == 1
        await until(lambda: here.waiting_items() == 0 and running.worker.room.taken == 0)


async def test_frames_name_their_tokens_without_gaps() -> None:
    async with world() as here:
        await here.worker()
        await here.enqueue(make_request(clock=here.clock, max_tokens=50))
        await here.terminal()
        expected = 0
        for frame in [message for message in await here.journalled() if isinstance(message, Frame)]:
            assert frame.offset == expected
            expected += len(unpack_tokens(frame.tokens))
        assert expected == 50


async def test_a_first_delivery_is_claimed_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence is the reading: nothing goes over the wire before the claim."""
    async with world() as here:
        await here.worker()

        async def read(*given: object) -> object:
            raise AssertionError("the journal was read")

        monkeypatch.setattr(journal, "read", read)
        await here.enqueue(make_request(clock=here.clock))
        assert (await here.terminal()).attempt == 1
        assert await here.tokens() == (stream(PROMPT, SEED, 20),)


async def test_c2_a_first_delivery_of_a_request_with_a_journal_goes_on_after_it() -> None:
    """A consumer that the server made anew counts deliveries from one again: the claim of attempt 1 is refused."""
    async with world() as here:
        first = await here.worker("w1", budget=4)
        request = make_request(clock=here.clock, max_tokens=40)
        await here.enqueue(request)
        await here.said(12)
        await first.die()
        await here.worker("w2")
        await here.enqueue(request)
        terminal = await here.terminal()
        assert (terminal.attempt, terminal.worker_id) == (2, "w2")
        assert await here.tokens() == (stream(PROMPT, SEED, 40),)
        starts = [message for message in await here.journalled() if isinstance(message, Started)]
        assert [start.attempt for start in starts] == [1, 2]
        assert starts[1].resumed_offsets == (12,)
