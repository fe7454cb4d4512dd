"""Cancellations in every phase: before the claim, while queued, in mid-stream, after the end, missed live."""

from __future__ import annotations

import pytest

from shared.errors import Unavailable
from shared.protocol import codec, subjects
from shared.protocol.messages import Frame, Started
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, Running, World, make_request, until, world
from tests.unit.services.gpu_worker.scripted import stream


async def _running(here: World, budget: int, **changes: object) -> Running:
    """A worker that holds after `budget` steps of one request."""
    running = await here.worker(budget=budget)
    await here.enqueue(make_request(clock=here.clock, **changes))
    await until(lambda: bool(running.engine.submitted) and running.engine.budget == 0)
    return running


async def test_a_request_that_was_cancelled_before_is_not_run() -> None:
    async with world() as here:
        await here.cancel()
        running = await here.worker()
        await here.enqueue(make_request(clock=here.clock))
        terminal = await here.terminal()
        assert (terminal.cancel_reason, terminal.failure) == ("client_disconnected", None)
        assert (terminal.ends[0].finish, terminal.ends[0].completion_tokens) == ("cancelled", 0)
        assert running.engine.submitted == []
        assert not any(isinstance(message, Frame) for message in await here.journalled())
        await until(lambda: here.waiting_items() == 0)


class _Lost:
    """A look whose answer went with the connection."""

    async def found(self) -> None:
        raise Unavailable("no answer in time")

    def drop(self) -> None:
        pass


@pytest.mark.parametrize("cancelled", [True, False])
async def test_fr_102_a_claim_outlives_the_look_that_went_with_it(cancelled: bool) -> None:
    """The journal is patient, a look is not: cancellations are looked for anew, and the attempt is not lost."""
    async with world() as here:
        if cancelled:
            await here.cancel()
        running = await here.worker()

        async def look(stream: str, subject: str) -> _Lost:
            return _Lost()

        running.transport.look = look  # type: ignore[assignment, method-assign]
        await here.enqueue(make_request(clock=here.clock))
        terminal = await here.terminal()
        assert terminal.attempt == 1
        assert terminal.cancel_reason == ("client_disconnected" if cancelled else None)
        await until(lambda: here.waiting_items() == 0 and running.engine.at_baseline)


@pytest.mark.parametrize("budget", [0, 1, 3], ids=["queued", "primed", "streaming"])
async def test_fr_69_a_cancellation_ends_the_engine_s_work_within_one_step(budget: int) -> None:
    async with world() as here:
        running = await _running(here, budget, max_tokens=1000)
        steps = running.engine.steps
        await here.cancel()
        terminal = await here.terminal()
        assert (terminal.ends[0].finish, terminal.cancel_reason) == ("cancelled", "client_disconnected")
        assert terminal.failure is None
        assert running.engine.steps <= steps + 1
        (tokens,) = await here.tokens()
        assert tokens == stream(PROMPT, SEED, len(tokens))
        # FR-79: what was generated until the cancellation took effect is told.
        assert terminal.completion_tokens == 4 * max(0, budget - 1)
        await until(lambda: running.engine.at_baseline and here.waiting_items() == 0)
        assert not here.broker.leases


async def test_a_stop_string_found_by_the_reader_ends_as_stop_with_usage_at_its_token() -> None:
    async with world() as here:
        await _running(here, 4, max_tokens=1000)
        await here.cancel(reason="stop_string", offset=7)
        terminal = await here.terminal()
        (end,) = terminal.ends
        assert (end.finish, end.completion_tokens, terminal.completion_tokens) == ("stop", 7, 7)
        assert terminal.cancel_reason == "stop_string"
        assert end.emitted_tokens == len((await here.tokens())[0])


async def test_a_cancellation_that_was_missed_live_is_found_when_claims_are_kept() -> None:
    async with world() as here:
        running = await _running(here, 2, max_tokens=1000)
        listeners = list(here.server.listeners)
        here.server.listeners.clear()  # the live message reaches nobody
        await here.cancel()
        here.server.listeners.extend(listeners)
        await running.worker.keep_claims()
        assert (await here.terminal()).cancel_reason == "client_disconnected"


async def test_one_choice_may_be_cancelled_alone() -> None:
    async with world() as here:
        running = await _running(here, 2, choices=2, max_tokens=40)
        await here.cancel(reason="stop_string", offset=3, choice=1)
        await until(lambda: ("r1", 1) not in {(key[0].split(".")[0], key[1]) for key in running.engine.runs})
        assert len(running.engine.runs) == 1, "the engine went on with a choice that nobody reads"
        await running.let_go()
        terminal = await here.terminal()
        assert [(end.finish, end.completion_tokens) for end in terminal.ends] == [("length", 40), ("stop", 3)]
        tokens = await here.tokens(choices=2)
        assert len(tokens[0]) == 40
        assert terminal.ends[1].emitted_tokens == len(tokens[1]) < 40


async def test_choices_that_are_cancelled_one_by_one_end_the_request() -> None:
    async with world() as here:
        running = await _running(here, 2, choices=2, max_tokens=1000)
        await here.cancel(reason="stop_string", offset=3, choice=1)
        await here.cancel(reason="stop_string", offset=2, choice=0)
        terminal = await here.terminal()
        assert [(end.finish, end.completion_tokens) for end in terminal.ends] == [("stop", 2), ("stop", 3)]
        await until(lambda: running.engine.at_baseline)


async def test_a_cancellation_after_the_end_changes_nothing() -> None:
    async with world() as here:
        await here.worker()
        await here.enqueue(make_request(clock=here.clock))
        before = await here.terminal()
        await here.cancel()
        assert await here.terminal() == before


async def test_an_unreadable_cancellation_is_ignored() -> None:
    async with world() as here:
        await here.worker()
        await here.transport.append(subjects.cancel("r1"), b"nonsense")
        await here.enqueue(make_request(clock=here.clock))
        assert (await here.terminal()).ends[0].finish == "length"


async def test_a_resumed_request_reads_the_cancellation_before_it_runs() -> None:
    async with world() as here:
        first = await here.worker("w1", budget=3)
        await here.enqueue(make_request(clock=here.clock, max_tokens=40))
        await until(lambda: first.engine.budget == 0)

        def streamed() -> bool:
            last = here.server.streams[subjects.JOURNAL.name].last(subjects.tokens("r1"))
            return last is not None and not isinstance(codec.decode(last.data), Started)

        await until(streamed)
        await first.die()
        await here.cancel(reason="stop_string", offset=4)
        second = await here.worker("w2")
        here.clock.advance(16)
        terminal = await here.terminal()
        assert second.engine.submitted == []
        assert (terminal.ends[0].finish, terminal.completion_tokens) == ("stop", 4)
        assert terminal.ends[0].emitted_tokens == len((await here.tokens())[0])


async def test_cuts_of_several_choices_outlive_the_worker_that_heard_them() -> None:
    async with world() as here:
        first = await here.worker("w1", budget=3)
        await here.enqueue(make_request(clock=here.clock, choices=3, max_tokens=40))
        await until(lambda: first.engine.budget == 0)
        await first.die()
        await here.cancel(reason="stop_string", offset=2, choice=0)
        await here.cancel(reason="stop_string", offset=1, choice=1)
        await here.worker("w2")
        here.clock.advance(16)
        terminal = await here.terminal()
        told = [(end.finish, end.completion_tokens) for end in terminal.ends]
        assert told == [("stop", 2), ("stop", 1), ("length", 40)]
        assert terminal.completion_tokens == 43
