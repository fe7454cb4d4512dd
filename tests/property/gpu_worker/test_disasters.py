"""C2 and C6 under any order of kills, drains, stalls of the queue and foreign claims: one exact stream, one terminal,
nothing left behind."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.protocol import codec, subjects
from shared.protocol.messages import Started
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, Running, World, make_request, until, world
from tests.unit.services.gpu_worker.scripted import FINGERPRINT, stream

DISASTERS = st.lists(
    st.tuples(st.sampled_from(["kill", "drain", "outage", "thief", "late"]), st.integers(0, 4)),
    max_size=4,
)
TOKENS = 60


async def _steps(here: World, running: Running, count: int) -> None:
    """Let the engine go `count` steps further with what it has, if it has anything."""
    await running.let_go(count)
    await until(lambda: running.engine.budget == 0 or not running.engine.runs)


async def _thief(here: World) -> None:
    """Somebody else claims the request and is never heard of again."""
    last = await here.transport.last(subjects.JOURNAL.name, subjects.tokens("r1"))
    message = codec.decode(last.data) if last else None
    attempt = getattr(message, "attempt", 0) + 1
    started = Started(
        request_id="r1", attempt=attempt, worker_id="thief", fingerprint=FINGERPRINT, cached_tokens=0,
        resumed_offsets=(0,), resumed_scores=0, at_ns=0,
    )  # fmt: skip
    await here.transport.append(subjects.tokens("r1"), codec.encode(started))


async def _strike(here: World, running: Running, disaster: str, steps: int) -> bool:
    """One disaster; true when the worker is gone by it."""
    await until(lambda: bool(running.engine.submitted))
    await _steps(here, running, steps)
    match disaster:
        case "kill":
            await running.die()
        case "drain":
            running.drain.begin("disaster")
            await running.task
        case "outage":
            here.server.online = False
            await running.let_go(2)
            here.server.online = True
        case "thief":
            await _thief(here)
        case "late":
            here.clock.advance(16)
    return disaster in ("kill", "drain")


async def _live_through(disasters: list[tuple[str, int]]) -> None:
    config: dict[str, object] = {"drain_limit_s": 0.0, "max_attempts": 50}
    async with world() as here:
        await here.enqueue(make_request(clock=here.clock, max_tokens=TOKENS))
        running = await here.worker("w0", budget=0, settings=config)
        for number, (disaster, steps) in enumerate(disasters, 1):
            if await _strike(here, running, disaster, steps):
                here.clock.advance(16)
                running = await here.worker(f"w{number}", budget=0, settings=config)
        await running.let_go()

        def over() -> bool:
            here.clock.advance(1)
            return here.waiting_items() == 0

        await until(over)
        await here.terminal()
        assert await here.tokens() == (stream(PROMPT, SEED, TOKENS),)
        await until(lambda: running.worker.room.taken == 0 and running.engine.at_baseline)
        if not any(disaster == "kill" for disaster, _ in disasters):
            await until(lambda: not here.broker.leases)  # those of the killed go by expiry


@settings(deadline=None, max_examples=25)
@given(DISASTERS)
def test_any_order_of_disasters_gives_one_exact_stream(disasters: list[tuple[str, int]]) -> None:
    asyncio.run(asyncio.wait_for(_live_through(disasters), 60))
