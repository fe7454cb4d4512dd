"""Reports of other engines, tried on this worker: outages in mid-stream, calls that fill every place, a device that fails, and
what a takeover costs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.gpu_worker.app import Readiness
from services.gpu_worker.engine.events import Burst
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.host import EngineHost
from services.gpu_worker.journal import Journal
from shared.health import faults
from shared.lifecycle import TaskDied
from shared.protocol import chain, subjects
from shared.protocol.messages import Frame, Lease, Release, Started
from tests.engine_kit import GREEDY, WARM, build, prompt, request, run_one
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, make_request, until, world
from tests.unit.services.gpu_worker.scripted import ScriptedEngine, stream

KEY = chain.chain(chain.root(make_request().namespace), PROMPT)[1]
"""Of the first two blocks of the prompt."""


async def test_fr_105_an_outage_of_five_seconds_in_mid_stream_loses_and_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker goes on computing, and what it could not publish is published once by the same attempt."""
    tries, append = [], Journal.append

    async def counted(self: Journal, message: object, *args: object, **fields: object) -> object:
        tries.append(message)
        return await append(self, message, *args, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "append", counted)
    async with world() as here:
        running = await here.worker(budget=2, settings={"journal_patience_s": 60.0})
        await here.enqueue(make_request(clock=here.clock, max_tokens=40))
        await here.said(4)
        here.server.online = False
        told = len(tries)
        await running.let_go(3)
        await until(lambda: len(tries) > told)
        for _ in range(5):
            here.clock.advance(1)
        here.server.online = True
        await running.let_go()
        terminal = await here.terminal()
        assert (terminal.attempt, terminal.failure) == (1, None)
        frames = [message for message in await here.journalled() if isinstance(message, Frame)]
        offsets = [frame.offset for frame in frames]
        assert offsets == sorted(set(offsets)), "nothing is stored twice"
        assert await here.tokens() == (stream(PROMPT, SEED, 40),)
        await until(lambda: here.waiting_items() == 0)


async def test_fr_110_calls_that_wait_in_every_place_starve_nobody() -> None:
    """Each of the first requests waits for a lease that does not come. They go on without it, and so does who came after."""
    async with world() as here:
        running = await here.worker(settings={"max_requests": 4, "broker_timeout_s": 0.2})
        running.engine.entries[KEY] = 128
        here.broker.holding[Lease] = asyncio.Event()
        names = [f"r{number}" for number in range(6)]
        for name in names:
            await here.enqueue(make_request(name, clock=here.clock))
        for name in names:
            terminal = await here.terminal(name)
            assert (terminal.failure, terminal.cached_tokens) == (None, 0)
        assert here.broker.asked(Lease)
        here.broker.holding[Lease].set()
        await until(lambda: running.worker.room.taken == 0)


async def test_fr_77_a_lease_that_comes_after_its_request_has_left_goes_back() -> None:
    """Again and again: cancelled while the lease is asked for, which is granted all the same."""
    async with world() as here:
        running = await here.worker(settings={"broker_timeout_s": 30.0})
        running.engine.entries[KEY] = 128
        for number in range(40):
            name, asked = f"r{number}", len(here.broker.asked(Lease))
            here.broker.holding[Lease] = granted = asyncio.Event()
            await here.enqueue(make_request(name, clock=here.clock))
            await until(lambda asked=asked: len(here.broker.asked(Lease)) > asked)  # type: ignore[misc]
            await here.cancel(name)
            granted.set()
            assert (await here.terminal(name)).cancel_reason == "client_disconnected"
        await until(lambda: not here.broker.leases and running.engine.at_baseline)
        assert len(here.broker.asked(Release)) == len(here.broker.asked(Lease)) == 40


async def test_fr_123_a_device_that_fails_takes_the_worker_down_and_loading_does_not_flap() -> None:
    async with world() as here:
        loading = EngineHost(lambda: ScriptedEngine(clock=here.clock))
        readiness = Readiness(here.transport, loading)
        for _ in range(5):
            assert await faults(readiness.checks()) == {"model": "the model is not loaded"}
            here.clock.advance(60)
        running = await here.worker()
        readiness = Readiness(here.transport, running.core.host)
        readiness.worker = running.worker
        for _ in range(5):
            assert await faults(readiness.checks()) == {}
        running.engine.step_error = RuntimeError("CUDA error: an illegal memory access was encountered")
        await here.enqueue(make_request(clock=here.clock))
        with pytest.raises(TaskDied, match="engine"):
            await running.task
        assert "model" in await faults(readiness.checks())
        claims = [message for message in await here.journalled() if isinstance(message, Started)]
        assert len(claims) <= 1
        assert len(list(here.server.streams[subjects.REQUESTS.name].after(0))) == 1, "it is delivered again"


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_c2_a_takeover_costs_a_prime_and_a_verify_for_every_k_and_one_of_what_was_said(
    k: int, sampling: object
) -> None:
    """Its journal is what it drafts from, so that every draft stands."""
    said, limits = 48, EngineLimits(burst_rounds=1)
    whole = request(prompt(100, 1), "whole", max_tokens=60, sampling=sampling)
    expected = run_one(build(), whole).tokens
    engine = build(limits=limits)
    engine.submit(replace(whole, request_id="again", emitted=tuple(expected[:said]), speculation_k=k))
    before = engine.stats().rounds
    new: list[int] = []
    while not new:
        for event in engine.step():
            if isinstance(event, Burst):
                new += event.tokens[max(0, said - event.offset) :]
    assert new == expected[said : said + len(new)]
    assert engine.stats().rounds - before <= -(-said // (k + 1)) + 1
