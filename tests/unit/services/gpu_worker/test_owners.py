"""Room, and whose turn it is: a worker's own queue, priorities, and what an owner leaves to others."""

from __future__ import annotations

import asyncio

from tests.unit.services.gpu_worker.rig import PROMPT, SEED, make_request, until, world
from tests.unit.services.gpu_worker.scripted import stream


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


async def test_fr_97_another_worker_takes_over_what_the_owner_left_by_dying() -> None:
    """Its own subject, its own message: nobody enqueues a copy."""
    async with world() as here:
        first = await here.worker("w1", budget=2)
        await here.enqueue(make_request(clock=here.clock, max_tokens=40), to="w1")
        await here.said(4)
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
        await here.said(4)
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
        await here.said(4)
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
