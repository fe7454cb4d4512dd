"""How a worker leaves a request: poison, drain, a dead or stalled engine, a journal that takes or tells nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.gpu_worker import journal
from services.gpu_worker.app import Readiness
from services.gpu_worker.ways_out import retry_delay_s
from shared.health import faults
from shared.lifecycle import TaskDied
from shared.protocol import codec, subjects
from shared.protocol.messages import Frame, Terminal
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, make_request, until, world
from tests.unit.services.gpu_worker.scripted import FINGERPRINT, stream


async def test_a_request_that_keeps_killing_its_workers_is_poison() -> None:
    async with world() as here:
        sequence = 0
        for attempt in (1, 2, 3):
            sequence = await here.claim(attempt, f"dead-{attempt}", sequence)
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
            sequence = await here.claim(attempt, f"dead-{attempt}", sequence)
        await here.worker()
        await here.enqueue(make_request(clock=here.clock))
        failure = (await here.terminal()).failure
        assert failure is not None
        assert failure.code == "poison"
        assert await here.transport.last(subjects.DEAD.name, subjects.dead(FINGERPRINT)) is None
        await until(lambda: here.waiting_items() == 0)


async def test_a_journal_that_contradicts_itself_ends_in_an_error() -> None:
    async with world() as here:
        await here.claim(1, "dead", 0)
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


async def test_fr_124_a_draining_worker_finishes_what_runs_and_takes_nothing_new() -> None:
    async with world() as here:
        running = await here.worker(budget=2, settings={"drain_limit_s": 20.0})
        await here.enqueue(make_request("r1", clock=here.clock))
        await here.said(4)
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
        await here.said(8)
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
        await here.said(4)
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
        await here.said(4)
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


async def test_a_full_journal_ends_the_computing_and_is_told_as_unready_until_there_is_room() -> None:
    async with world() as here:
        running = await here.worker(budget=2, settings={"journal_patience_s": 5.0})
        await here.enqueue(make_request(clock=here.clock))
        await here.said(4)
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
        await here.claim(1, "dead", 0)  # a journal that has something is read
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
