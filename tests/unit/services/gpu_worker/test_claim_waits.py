"""While a claim waits to be stored, what the engine will get is made: whatever ends the wait, nothing of it stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from shared.errors import BurstlineError, FencedOut, Unavailable
from shared.protocol import codec, subjects
from shared.protocol.messages import Started
from shared.transport.base import Stored
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, Running, World, make_request, until, world
from tests.unit.services.gpu_worker.scripted import stream


@dataclass
class _Held:
    """The first claim of a worker: it waits until it is let go, and is then stored, or fails of `fault`."""

    running: Running
    fault: BurstlineError | None = None
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    goes: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._append = self.running.transport.append
        self.running.transport.append = self.append  # type: ignore[method-assign]

    async def append(self, subject: str, data: bytes, **given: Any) -> Stored:
        claims = subject == subjects.tokens("r1") and isinstance(codec.decode(data), Started)
        if claims and not self.waits.is_set():
            self.waits.set()
            await self.goes.wait()
            if self.fault is not None:
                raise self.fault
        return await self._append(subject, data, **given)


@asynccontextmanager
async def _waiting(
    *, warm: bool = True, fault: BurstlineError | None = None
) -> AsyncIterator[tuple[World, _Held]]:
    """A worker whose claim of `r1` waits; `warm`: with a hit, which it has leased."""
    async with world() as here:
        running = await here.worker()
        if warm:
            await here.enqueue(make_request("r0", clock=here.clock))
            await here.terminal("r0")
            await until(lambda: running.worker.room.taken == 0)
        held = _Held(running, fault)
        await here.enqueue(make_request(clock=here.clock))
        await held.waits.wait()
        yield here, held


def _given_back(running: Running) -> bool:
    return running.worker.room.taken == 0 and running.engine.at_baseline


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("fault", [FencedOut("another was first"), Unavailable("no answer")])
async def test_a_claim_that_fails_is_made_again(warm: bool, fault: BurstlineError) -> None:
    async with _waiting(warm=warm, fault=fault) as (here, held):
        held.goes.set()
        await here.terminal()
        assert await here.tokens() == (stream(PROMPT, SEED, 20),)
        await until(lambda: _given_back(held.running) and here.waiting_items() == 0)


async def test_a_cancellation_that_comes_meanwhile_keeps_it_from_the_engine() -> None:
    async with _waiting() as (here, held):
        submitted = len(held.running.engine.submitted)
        await here.cancel()
        attempt = held.running.worker._reception.attempts["r1"]
        await until(lambda: not attempt._intake.outcome.open)
        held.goes.set()
        assert (await here.terminal()).cancel_reason == "client_disconnected"
        assert len(held.running.engine.submitted) == submitted
        await until(lambda: _given_back(held.running) and here.waiting_items() == 0)


async def test_a_worker_that_leaves_meanwhile_hands_it_back() -> None:
    async with _waiting() as (here, held):
        submitted = len(held.running.engine.submitted)
        await held.running.stop()
        assert held.running.engine.at_baseline
        assert len(held.running.engine.submitted) == submitted
        await here.worker("w2")
        await here.terminal()
        assert await here.tokens() == (stream(PROMPT, SEED, 20),)


async def test_what_cannot_be_made_for_the_engine_is_told_after_the_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unmade(*_: object, **__: object) -> None:
        raise ValueError("something of the prompt")

    monkeypatch.setattr("services.gpu_worker.claimant.engine_requests", unmade)
    async with _waiting(warm=False) as (here, held):
        assert await here.journalled() == []
        held.goes.set()
        failure = (await here.terminal()).failure
        assert failure is not None
        assert (failure.code, "prompt" in failure.message) == ("internal_error", False)
        await until(lambda: _given_back(held.running))
