"""FR-109: workers come and go under load. Every request ends, and none is without progress for longer than the ack wait."""

from __future__ import annotations

import asyncio

import pytest

from shared.protocol import subjects
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, Running, World, make_request, until, world
from tests.unit.services.gpu_worker.scripted import stream

REQUESTS = 24
TENANTS = 5
TOKENS = 60
ACK_WAIT_S = 15.0
GOERS = 4
SETTINGS: dict[str, object] = {"max_running": 4, "drain_limit_s": 0.0, "max_attempts": GOERS + 1}
"""A request may be with each of those who go before its first token: three such attempts in vain would make it poison."""


async def _load(here: World, names: range, to: str | None = None) -> None:
    for number in names:
        tenant = f"t{number % TENANTS}"
        await here.enqueue(make_request(f"r{number}", here.clock, tenant=tenant, max_tokens=TOKENS), to=to)


async def _leave(running: Running, *, killed: bool) -> None:
    """By SIGKILL, or by SIGTERM with what it could not finish handed back."""
    if killed:
        await running.die()
        return
    running.drain.begin("scaled down")
    await asyncio.gather(running.task, return_exceptions=True)


def _answered(here: World) -> int:
    return len({one.subject for one in here.server.streams[subjects.JOURNAL.name].after(0)})


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "drained"])
async def test_fr_109_every_request_ends_while_workers_go_from_one_to_three_and_back_twice(
    killed: bool,
) -> None:
    async with world() as here:
        workers = [await here.worker("w0", settings=SETTINGS, budget=40)]
        third = REQUESTS // 3
        await _load(here, range(third), to="w0")  # as chosen by routing: the worker that is about to go
        for turn in (1, 2):
            workers += [
                await here.worker(f"w{turn}{number}", settings=SETTINGS, budget=40) for number in range(2)
            ]
            await _load(here, range(turn * third, (turn + 1) * third))
            await until(lambda turn=turn: _answered(here) >= turn * 4)
            for running in workers[-3:-1]:
                await _leave(running, killed=killed)
        await workers[-1].let_go()
        here.clock.advance(ACK_WAIT_S + 1)  # what the dead held is delivered again by now, all of it
        for number in range(REQUESTS):
            terminal = await here.terminal(f"r{number}")
            assert terminal.failure is None
            assert await here.tokens(f"r{number}") == (stream(PROMPT, SEED, TOKENS),)
        await until(lambda: here.waiting_items() == 0)
