"""Who owns a request: fences, takeovers, redeliveries, poison, drain, and workers that die."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.gpu_worker import journal
from services.gpu_worker.app import Readiness
from services.gpu_worker.storing import JournalHealth
from services.gpu_worker.ways_out import retry_delay_s
from shared.clock import ManualClock
from shared.health import faults
from shared.lifecycle import TaskDied
from shared.protocol import codec, subjects
from shared.protocol.messages import Frame, Started, Terminal, unpack_tokens
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, World, make_request, until, world
from tests.unit.services.gpu_worker.scripted import FINGERPRINT, stream


async def _claim(here: World, attempt: int, worker_id: str, expected: int, request_id: str = "r1") -> int:
    started = Started(
        request_id=request_id, attempt=attempt, worker_id=worker_id, fingerprint=FINGERPRINT, cached_tokens=0,
        resumed_offsets=(0,), resumed_scores=0, at_ns=attempt,
    )  # fmt: skip
    stored = await here.transport.append(
        subjects.tokens(request_id), codec.encode(started), expected_last_subject_sequence=expected
    )
    return stored.sequence


async def _tokens(here: World, count: int) -> None:
    """Wait until so many completion tokens are journalled, over all choices."""

    def enough() -> bool:
        stored = here.server.streams[subjects.JOURNAL.name].read(subjects.tokens("r1"), 0, 1000)
        frames = [
            message
            for message in map(codec.decode, (one.data for one in stored))
            if isinstance(message, Frame)
        ]
        return sum(len(unpack_tokens(frame.tokens)) for frame in frames) >= count

    await until(enough)


async def test_fr_96_a_worker_that_lost_its_claim_publishes_nothing_more() -> None:
    async with world() as here:
        running = await here.worker(budget=3)
        await here.enqueue(make_request(clock=here.clock, max_tokens=40_000))
        await _tokens(here, 8)
        before = await here.journalled()
        last = await here.transport.last(subjects.JOURNAL.name, subjects.tokens("r1"))
        assert last is not None
        await _claim(here, 2, "thief", last.sequence)
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
        await _tokens(here, 12)
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
        await _tokens(here, 12)
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
        await _tokens(here, 16)
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


async def test_a_request_that_keeps_killing_its_workers_is_poison() -> None:
    async with world() as here:
        sequence = 0
        for attempt in (1, 2, 3):
            sequence = await _claim(here, attempt, f"dead-{attempt}", sequence)
        running = await here.worker()
        request = make_request(clock=here.clock)
        await here.enqueue(request)
        terminal = await here.terminal()
        assert terminal.failure is not None
        assert (terminal.failure.code, terminal.attempt) == ("poison", 4)
        assert running.engine.submitted == []
        kept = await here.transport.last(subjects.DEAD.name, subjects.dead(FINGERPRINT))
        assert kept is not None
        assert kept.data == codec.encode(request)
        await until(lambda: here.waiting_items() == 0)


async def test_poison_ends_though_the_stream_of_dead_letters_is_full() -> None:
    """Else it would come back, and be refused, for as long as nobody clears the stream."""
    async with world() as here:
        await here.transport.ensure_stream(replace(subjects.DEAD, max_bytes=1))
        sequence = 0
        for attempt in (1, 2, 3):
            sequence = await _claim(here, attempt, f"dead-{attempt}", sequence)
        await here.worker()
        await here.enqueue(make_request(clock=here.clock))
        failure = (await here.terminal()).failure
        assert failure is not None
        assert failure.code == "poison"
        assert await here.transport.last(subjects.DEAD.name, subjects.dead(FINGERPRINT)) is None
        await until(lambda: here.waiting_items() == 0)


async def test_a_journal_that_contradicts_itself_ends_in_an_error() -> None:
    async with world() as here:
        await _claim(here, 1, "dead", 0)
        gap = Frame(request_id="r1", attempt=1, choice=0, offset=5, tokens=b"\1\0\0\0", logprobs=None)
        await here.transport.append(subjects.tokens("r1"), codec.encode(gap))
        await here.worker()
        await here.enqueue(make_request(clock=here.clock))

        def ended() -> bool:
            last = here.server.streams[subjects.JOURNAL.name].last(subjects.tokens("r1"))
            return last is not None and isinstance(codec.decode(last.data), Terminal)

        await until(ended)
        terminal = (await here.journalled())[-1]
        assert isinstance(terminal, Terminal)
        assert terminal.failure is not None
        assert terminal.failure.code == "protocol_error"


async def test_fr_97_claims_are_kept_while_the_engine_works_and_left_when_it_stalls() -> None:
    async with world() as here:
        running = await here.worker(budget=2, settings={"stall_limit_s": 60.0})
        await here.enqueue(make_request(clock=here.clock))
        await _tokens(here, 4)
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
        await _tokens(here, 4)
        here.clock.advance(16)  # the claim was not kept in time: the queue delivers again, to the same worker
        (attempt,) = running.worker._reception.attempts.values()
        await until(lambda: attempt._item._delivery.delivery_count == 2)
        await running.let_go()
        terminal = await here.terminal()
        assert terminal.attempt == 1
        assert len(running.engine.submitted) == 1
        await until(lambda: here.waiting_items() == 0 and running.worker.room.taken == 0)


async def test_fr_124_a_draining_worker_finishes_what_runs_and_takes_nothing_new() -> None:
    async with world() as here:
        running = await here.worker(budget=2, settings={"drain_limit_s": 20.0})
        await here.enqueue(make_request("r1", clock=here.clock))
        await _tokens(here, 4)
        running.drain.begin("test")
        await until(lambda: running.worker.pulse.draining)
        assert not running.worker.pulse.heartbeat().ready
        await here.enqueue(make_request("r2", clock=here.clock))
        await running.let_go()
        await here.terminal("r1")
        await running.task
        assert await here.journalled("r2") == []
        assert here.waiting_items() == 1


async def test_fr_124_what_a_drain_cannot_finish_is_handed_back_at_once() -> None:
    async with world() as here:
        first = await here.worker("w1", budget=3, settings={"drain_limit_s": 0.0})
        await here.enqueue(make_request(clock=here.clock, max_tokens=40))
        await _tokens(here, 8)
        first.drain.begin("test")
        await first.task
        await here.worker("w2")  # no clock is moved: the work item is there at once
        terminal = await here.terminal()
        assert terminal.attempt == 2
        assert await here.tokens() == (stream(PROMPT, SEED, 40),)


async def test_fr_109_workers_that_drain_one_after_another_make_no_request_poison() -> None:
    """Handed back before its first token, more often than poison is tried: a rolling restart during a long prime."""
    async with world() as here:
        await here.enqueue(make_request(clock=here.clock))
        for number in range(5):
            running = await here.worker(f"w{number}", budget=0, settings={"drain_limit_s": 0.0})
            await until(lambda running=running: bool(running.engine.submitted))
            running.drain.begin("test")
            await running.task
        await here.worker("last")
        terminal = await here.terminal()
        assert (terminal.failure, terminal.attempt, terminal.worker_id) == (None, 6, "last")
        assert await here.tokens() == (stream(PROMPT, SEED, 20),)


async def test_a_dead_engine_thread_takes_the_worker_down_and_another_goes_on() -> None:
    async with world() as here:
        first = await here.worker("w1", budget=2)
        await here.enqueue(make_request(clock=here.clock, max_tokens=40))
        await _tokens(here, 4)
        first.engine.step_error = RuntimeError("the device is lost")
        await first.let_go()
        with pytest.raises(TaskDied, match="engine"):
            await first.task
        await here.worker("w2")
        terminal = await here.terminal()
        assert terminal.worker_id == "w2"
        assert await here.tokens() == (stream(PROMPT, SEED, 40),)


async def test_fr_110_a_stalled_engine_is_told_and_takes_the_worker_down() -> None:
    import threading

    async with world() as here:
        stuck = threading.Event()
        running = await here.worker(stuck=stuck, settings={"stall_limit_s": 60.0, "heartbeat_s": 0.01})
        beats = await here.transport.subscribe(subjects.HEARTBEATS)
        await here.enqueue(make_request(clock=here.clock))
        await until(lambda: bool(running.engine.submitted))
        here.clock.advance(61)
        with pytest.raises(TaskDied, match="no progress"):
            await running.task
        last = None
        while (beat := await beats.next(0.05)) is not None:
            last = codec.decode(beat.data)
        assert last is not None
        assert not last.ready  # type: ignore[attr-defined]
        stuck.set()


async def test_an_unreachable_journal_leaves_the_request_to_another_attempt() -> None:
    async with world() as here:
        running = await here.worker(budget=2, settings={"journal_patience_s": 5.0})
        await here.enqueue(make_request(clock=here.clock))
        await _tokens(here, 4)
        here.server.online = False
        await running.let_go()
        await until(lambda: not running.engine.runs)

        def given_up() -> bool:
            here.clock.advance(1)  # the patience counts from the publish that fails
            return running.worker.room.taken == 0

        await until(given_up)
        here.server.online = True
        assert not any(isinstance(message, Terminal) for message in await here.journalled())
        here.clock.advance(16)
        terminal = await here.terminal()
        assert terminal.attempt == 2
        assert await here.tokens() == (stream(PROMPT, SEED, 20),)


async def test_the_room_is_never_exceeded() -> None:
    async with world() as here:
        running = await here.worker(budget=0, settings={"max_running": 2})
        for number in range(6):
            await here.enqueue(make_request(f"r{number}", clock=here.clock))
        await until(lambda: len(running.engine.submitted) == 2)
        await asyncio.sleep(0)
        assert running.worker.room.taken == 2
        await running.let_go()
        for number in range(6):
            await here.terminal(f"r{number}")
        await until(lambda: here.waiting_items() == 0)


async def test_its_own_queue_and_high_priority_go_first() -> None:
    async with world() as here:
        running = await here.worker(budget=0, settings={"max_running": 1})
        await here.enqueue(make_request("first", clock=here.clock))
        await until(lambda: len(running.engine.submitted) == 1)
        await here.enqueue(make_request("low", clock=here.clock, priority="low"))
        await here.enqueue(make_request("normal", clock=here.clock))
        await here.enqueue(make_request("high", clock=here.clock, priority="high"))
        await here.enqueue(make_request("own", clock=here.clock), to="w1")
        await running.let_go()
        for name in ("own", "high", "normal", "low"):
            await here.terminal(name)
        order = [one.request_id.partition(".")[0] for one in running.engine.submitted]
        assert order == ["first", "own", "high", "normal", "low"]


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


async def test_fr_97_another_worker_takes_over_what_the_owner_left_by_dying() -> None:
    """Its own subject, its own message: nobody enqueues a copy."""
    async with world() as here:
        first = await here.worker("w1", budget=2)
        await here.enqueue(make_request(clock=here.clock, max_tokens=40), to="w1")
        await _tokens(here, 4)
        await first.die()
        second = await here.worker("w2")
        assert here.waiting_items() == 1
        here.clock.advance(16)
        terminal = await here.terminal()
        assert (terminal.attempt, terminal.worker_id) == (2, "w2")
        assert await here.tokens() == (stream(PROMPT, SEED, 40),)
        assert second.core.metrics.taken.labels("spill")._value.get() == 1
        await until(lambda: here.waiting_items() == 0)


async def test_a_full_owner_leaves_what_it_cannot_take_to_the_others() -> None:
    async with world() as here:
        first = await here.worker("w1", budget=2, settings={"max_running": 1})
        await here.enqueue(make_request("r1", clock=here.clock), to="w1")
        await _tokens(here, 4)
        await here.enqueue(make_request("r2", clock=here.clock), to="w1")
        await until(lambda: first.worker.pulse.heartbeat().waiting >= 1)
        await here.worker("w2")
        assert (await here.terminal("r2")).worker_id == "w2"
        await first.let_go()
        assert (await here.terminal("r1")).worker_id == "w1"


async def test_an_owner_with_room_keeps_its_own_requests() -> None:
    async with world() as here:
        await here.worker("w1")
        second = await here.worker("w2")
        for number in range(12):
            await here.enqueue(make_request(f"r{number}", clock=here.clock), to="w1")
            assert (await here.terminal(f"r{number}")).worker_id == "w1"
        assert second.engine.submitted == []


async def test_c2_a_claim_taken_from_a_slow_owner_is_fenced_there() -> None:
    """The owner lives, and did not extend its claim in time."""
    async with world() as here:
        first = await here.worker("w1", budget=2, settings={"max_running": 1})
        await here.enqueue(make_request(clock=here.clock, max_tokens=40), to="w1")
        await _tokens(here, 4)
        second = await here.worker("w2", budget=3)
        here.clock.advance(16)
        await until(lambda: len(second.engine.submitted) == 1)
        await first.let_go()
        fenced = first.core.metrics.requests.labels("fenced")._value
        await until(lambda: fenced.get() == 1)
        await second.let_go()
        terminal = await here.terminal()
        assert (terminal.attempt, terminal.worker_id) == (2, "w2")
        assert await here.tokens() == (stream(PROMPT, SEED, 40),)


async def test_a_full_journal_ends_the_computing_and_is_told_as_unready_until_there_is_room() -> None:
    async with world() as here:
        running = await here.worker(budget=2, settings={"journal_patience_s": 5.0})
        await here.enqueue(make_request(clock=here.clock))
        await _tokens(here, 4)
        stored = here.server.streams[subjects.JOURNAL.name]
        size, pulse = stored.spec.max_bytes, running.worker.pulse
        stored.update(replace(stored.spec, max_bytes=1))
        await running.let_go()

        def told() -> bool:
            here.clock.advance(1)
            return pulse.journal_fault is not None

        await until(told)
        assert not pulse.heartbeat().ready
        readiness = Readiness(here.transport, running.core.host)
        readiness.worker = running.worker
        reasons = await faults(readiness.checks())
        assert reasons == {"journal": "the journal takes nothing (overloaded)"}
        await until(lambda: not running.engine.runs)
        submitted = len(running.engine.submitted)
        for _ in range(20):  # tried again, claims only
            here.clock.advance(1)
            await running.core.host.call(lambda engine: None)
        assert len(running.engine.submitted) == submitted
        stored.update(replace(stored.spec, max_bytes=size))

        def ended() -> bool:
            here.clock.advance(0.2)
            return running.worker.room.taken == 0 and here.waiting_items() == 0

        await until(ended)
        assert pulse.heartbeat().ready
        assert await here.tokens() == (stream(PROMPT, SEED, 20),)


def test_the_fault_of_a_journal_is_believed_for_a_while() -> None:
    """An unready worker is sent nothing: only a new try tells whether there is room."""
    clock = ManualClock()
    health = JournalHealth(clock, hold_s=30)
    assert health.fault is None
    health.gave_up("overloaded")
    clock.advance(29)
    assert health.fault is not None
    clock.advance(1)
    assert health.fault is None
    health.gave_up("overloaded")
    health.stored()
    assert health.fault is None


def test_what_is_left_comes_back_later_each_time_and_within_the_ack_wait() -> None:
    delays = [retry_delay_s(deliveries, 15.0) for deliveries in range(1, 40)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays == sorted(delays)
    assert delays[-1] == 15.0


async def test_a_journal_that_cannot_be_read_by_a_fault_of_ours_is_counted_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as here:
        running = await here.worker()
        read, faults = journal.read, [RuntimeError("a fault"), RuntimeError("a fault")]

        async def failing(*given: object) -> object:
            if faults:
                raise faults.pop()
            return await read(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(journal, "read", failing)
        await _claim(here, 1, "dead", 0)  # a journal that has something is read
        await here.enqueue(make_request(clock=here.clock))
        unbegun = running.core.metrics.unbegun._value
        await until(lambda: unbegun.get() == 1 and running.worker.room.taken == 0)
        here.clock.advance(0.6)
        await until(lambda: unbegun.get() == 2 and running.worker.room.taken == 0)
        here.clock.advance(0.6)
        await here.worker("w2")
        assert len(await here.journalled()) == 1  # the second time it waits a second
        here.clock.advance(0.6)
        assert (await here.terminal()).failure is None


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
        await _tokens(here, 12)
        await first.die()
        await here.worker("w2")
        await here.enqueue(request)
        terminal = await here.terminal()
        assert (terminal.attempt, terminal.worker_id) == (2, "w2")
        assert await here.tokens() == (stream(PROMPT, SEED, 40),)
        starts = [message for message in await here.journalled() if isinstance(message, Started)]
        assert [start.attempt for start in starts] == [1, 2]
        assert starts[1].resumed_offsets == (12,)
