"""The engine's thread: commands, events, bounds, idleness, progress, death."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.gpu_worker.engine.events import Burst, Event, Finished
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.gpu_worker.host import EngineHost
from shared.clock import ManualClock
from shared.errors import EngineFault, Overloaded
from tests.unit.services.gpu_worker.rig import until
from tests.unit.services.gpu_worker.scripted import ScriptedEngine


def _request(request_id: str = "r", **changes: object) -> GenerateRequest:
    options = {
        "root": b"",
        "tokens": (1, 2, 3),
        "chain": (),
        "sampling": SamplingParams(seed=1),
        "max_tokens": 8,
    }
    return GenerateRequest(request_id=request_id, **{**options, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def _host(engine: ScriptedEngine, events: list[Event]) -> AsyncIterator[EngineHost]:
    host = EngineHost(lambda: engine, clock=engine.clock)
    host.deliver_to(events.extend)
    await host.start()
    try:
        yield host
    finally:
        assert await host.stop(limit_s=10)


async def test_events_come_in_order_and_on_the_loop_s_thread() -> None:
    events: list[Event] = []
    threads: set[int] = set()
    engine = ScriptedEngine(clock=ManualClock())
    async with _host(engine, events) as host:
        host.deliver_to(lambda batch: (threads.add(threading.get_ident()), events.extend(batch))[0])
        await host.call(lambda engine: engine.submit(_request()), urgent=True)
        await until(lambda: any(isinstance(event, Finished) for event in events))
        assert threads == {threading.get_ident()}
        assert [event.offset for event in events if isinstance(event, Burst)] == [0, 4]
        assert engine.interrupts == 1


async def test_the_next_step_waits_until_the_loop_has_a_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gpu_worker.host._HAND_OVER_S", 30.0)
    engine, steps = ScriptedEngine(clock=ManualClock(), budget=1), dict[str, int]()

    def on_events(batch: list[Event]) -> None:
        for event in batch:
            steps.setdefault(type(event).__name__, engine.steps)

    def go_on(engine: ScriptedEngine) -> None:
        engine.budget = None

    async with _host(engine, []) as host:
        host.deliver_to(on_events)
        await host.call(lambda engine: engine.submit(_request()))
        await until(lambda: "Primed" in steps)
        await host.call(go_on)
        await until(lambda: "Finished" in steps)
        assert steps["Burst"] == 2  # the prime's and its own


async def test_a_loop_that_does_not_come_is_not_waited_for() -> None:
    events: list[Event] = []
    engine, submitted = ScriptedEngine(clock=ManualClock()), threading.Event()

    def submit(engine: ScriptedEngine) -> None:
        engine.submit(_request())
        submitted.set()

    async with _host(engine, events) as host:
        calling = asyncio.create_task(host.call(submit))
        await asyncio.sleep(0)
        assert submitted.wait(10)  # the loop stands still from here on
        still = threading.Event()
        for _ in range(1000):
            if engine.steps >= 3:
                break
            still.wait(0.01)
        assert engine.steps == 3  # a prime and two bursts
        assert events == []
        await calling
        await until(lambda: any(isinstance(event, Finished) for event in events))


async def test_a_command_s_error_is_its_caller_s_alone() -> None:
    events: list[Event] = []
    engine = ScriptedEngine(clock=ManualClock(), submit_error=Overloaded("full"))
    async with _host(engine, events) as host:
        with pytest.raises(Overloaded):
            await host.call(lambda engine: engine.submit(_request()))
        assert await host.call(lambda engine: engine.fingerprint) == engine.fingerprint
        assert host.loaded


async def test_a_cancelled_caller_leaves_the_host_sound() -> None:
    events: list[Event] = []
    engine = ScriptedEngine(clock=ManualClock())
    async with _host(engine, events) as host:
        gate = threading.Event()
        blocked = asyncio.create_task(host.call(lambda engine: gate.wait(10)))
        second = asyncio.create_task(host.call(lambda engine: engine.fingerprint))
        await asyncio.sleep(0)
        second.cancel()
        gate.set()
        assert await blocked
        with pytest.raises(asyncio.CancelledError):
            await second
        assert await host.call(lambda engine: 5) == 5


async def test_a_failing_build_is_told_to_start() -> None:
    def build() -> ScriptedEngine:
        raise EngineFault("no such folder")

    host = EngineHost(build)
    with pytest.raises(EngineFault, match="no such folder"):
        await host.start()
    assert not host.loaded


async def test_a_dead_thread_is_told_and_refuses_commands() -> None:
    engine = ScriptedEngine(clock=ManualClock(), step_error=RuntimeError("the device is lost"))
    host = EngineHost(lambda: engine, clock=engine.clock)
    await host.start()
    await host.call(lambda engine: engine.submit(_request()))
    with pytest.raises(EngineFault, match="RuntimeError"):
        await host.failed()
    assert not host.loaded
    with pytest.raises(EngineFault, match="stopped"):
        await host.call(lambda engine: engine.fingerprint)
    assert await host.stop(limit_s=5)


async def test_commands_that_wait_at_the_end_are_refused_and_not_forgotten() -> None:
    engine = ScriptedEngine(clock=ManualClock())
    host = EngineHost(lambda: engine, clock=engine.clock)
    await host.start()
    entered, gate = threading.Event(), threading.Event()
    first = asyncio.create_task(host.call(lambda engine: (entered.set(), gate.wait(10))[1]))
    assert await asyncio.to_thread(entered.wait, 10)
    waiting = asyncio.create_task(host.call(lambda engine: engine.fingerprint))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(host.stop(limit_s=10))
    await asyncio.sleep(0)
    gate.set()
    assert await first
    with pytest.raises(EngineFault, match="stopped"):
        await waiting
    assert await stopping


async def test_the_engine_waits_for_a_loop_that_lags() -> None:
    """More batches than there is credit for: the thread stops stepping until the loop takes them."""
    events: list[Event] = []
    engine = ScriptedEngine(clock=ManualClock(), burst=1)
    async with _host(engine, events) as host:
        submitted = threading.Event()

        def submit(engine: object) -> None:
            engine.submit(_request(max_tokens=500))  # type: ignore[attr-defined]
            submitted.set()

        call = asyncio.create_task(host.call(submit))
        await asyncio.sleep(0)
        # The loop is held here on purpose: nothing that the thread tells is taken.
        assert submitted.wait(10)
        deadline = threading.Event()
        before = -1
        while engine.steps != before:
            before = engine.steps
            deadline.wait(0.2)
        assert engine.steps < 100
        await call
        await until(lambda: any(isinstance(event, Finished) for event in events))
        assert sum(len(event.tokens) for event in events if isinstance(event, Burst)) == 500


async def test_an_idle_engine_is_not_polled() -> None:
    events: list[Event] = []
    engine = ScriptedEngine(clock=ManualClock())
    asked = 0
    plain = engine.has_work

    def has_work() -> bool:
        nonlocal asked
        asked += 1
        return plain()

    engine.has_work = has_work  # type: ignore[method-assign]
    async with _host(engine, events) as host:
        await host.call(lambda engine: None)
        await host.call(lambda engine: None)
        before = asked
        await asyncio.sleep(0.1)
        assert asked - before <= 3


async def test_progress_is_work_done_and_not_steps_taken() -> None:
    events: list[Event] = []
    clock = ManualClock()
    stuck = threading.Event()
    engine = ScriptedEngine(clock=clock, stuck=stuck)
    async with _host(engine, events) as host:
        clock.advance(100)
        assert host.quiet_s() == 0.0  # idle is no stall
        await host.call(lambda engine: engine.submit(_request()))
        clock.advance(30)
        await until(lambda: host.quiet_s() >= 30)
        stuck.set()
        await until(lambda: any(isinstance(event, Finished) for event in events))
        await until(lambda: host.quiet_s() == 0.0)


async def test_whoever_has_a_command_s_answer_finds_the_picture_after_it() -> None:
    """An idle engine is scraped too, and a publish or an eviction changed its pools."""
    engine = ScriptedEngine(clock=ManualClock())
    async with _host(engine, []) as host:
        for count in range(1, 50):
            await host.call(lambda _, count=count: engine.entries.update({bytes([count]): 64}))  # type: ignore[misc]
            assert host.stats is not None
            assert host.stats.entries == count
