"""Ordered bounded shutdown, loud tasks, signals that drain."""

from __future__ import annotations

import asyncio
import gc
import os
import signal

import pytest

from shared.lifecycle import (
    Drain,
    Shutdown,
    Supervisor,
    TaskDied,
    cancel_and_wait,
    drain_on_signals,
    keep_what_is_loaded,
    run_to_end,
)


async def test_drain_keeps_the_first_reason() -> None:
    drain = Drain()
    waiting = asyncio.create_task(drain.wait())
    assert not drain.begun
    drain.begin("SIGTERM")
    drain.begin("SIGINT")
    await waiting
    assert (drain.begun, drain.reason) == (True, "SIGTERM")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    async with drain_on_signals() as drain:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(10):
            await drain.wait()
        assert drain.reason == number.name
    assert signal.getsignal(number) in (before, signal.SIG_DFL, signal.default_int_handler)


async def test_the_second_signal_stops_now() -> None:
    async def service() -> None:
        async with drain_on_signals() as drain:
            os.kill(os.getpid(), signal.SIGTERM)
            await drain.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(service())


async def test_steps_run_last_first_whatever_the_others_do(caplog: pytest.LogCaptureFixture) -> None:
    order: list[str] = []

    def step(name: str, error: Exception | None = None, *, hang: bool = False) -> object:
        async def run() -> None:
            order.append(name)
            if error is not None:
                raise error
            if hang:
                await asyncio.Event().wait()

        return run

    async with Shutdown() as shutdown:
        shutdown.push("first", step("first"))  # type: ignore[arg-type]
        shutdown.push("hangs", step("hangs", hang=True), limit_s=0.01)  # type: ignore[arg-type]
        shutdown.push("fails", step("fails", ValueError("x")))  # type: ignore[arg-type]
    assert order == ["fails", "hangs", "first"]
    text = caplog.text
    assert "fails failed" in text
    assert "hangs took more than 0.01 s" in text


async def test_a_cancelled_service_still_gives_everything_back() -> None:
    given: list[str] = []
    closing = asyncio.Event()
    release = asyncio.Event()

    async def slow() -> None:
        closing.set()
        await release.wait()
        given.append("slow")

    async def last() -> None:
        given.append("last")

    async def service() -> None:
        async with Shutdown() as shutdown:
            shutdown.push("last", last)
            shutdown.push("slow", slow)

    task = asyncio.create_task(service())
    await closing.wait()
    task.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert given == ["slow", "last"]


async def test_the_error_of_the_block_is_kept() -> None:
    async def fine() -> None: ...

    async def service() -> None:
        async with Shutdown() as shutdown:
            shutdown.push("fine", fine)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await service()


@pytest.mark.parametrize("how", ["raises", "returns"])
async def test_a_task_that_ends_takes_the_process_down_by_name(
    caplog: pytest.LogCaptureFixture, how: str
) -> None:
    other_ended = asyncio.Event()

    async def heartbeat() -> None:
        if how == "raises":
            raise ValueError("boom")

    async def other() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            other_ended.set()

    async def service() -> None:
        async with Supervisor() as supervisor:
            supervisor.spawn("other", other())
            supervisor.spawn("heartbeat", heartbeat())
            await asyncio.Event().wait()

    with pytest.raises(TaskDied, match="heartbeat") as caught:
        await service()
    assert isinstance(caught.value.__cause__, ValueError) == (how == "raises")
    assert other_ended.is_set()
    assert "heartbeat has ended" in caplog.text
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_task_that_dies_while_the_block_ends_is_told_too() -> None:
    async def die() -> None:
        raise ValueError("boom")

    async def service() -> None:
        async with Supervisor() as supervisor:
            supervisor.spawn("late", die())
            await asyncio.sleep(0)

    with pytest.raises(TaskDied):
        await service()
    await asyncio.sleep(0)  # no cancellation is left over


async def test_leaving_cancels_the_tasks_and_a_foreign_cancel_stays_one() -> None:
    ended: list[str] = []
    running = asyncio.Event()

    async def work() -> None:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def service() -> None:
        async with Supervisor() as supervisor:
            supervisor.spawn("work", work())
            await asyncio.Event().wait()

    task = asyncio.create_task(service())
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work"]


async def _loses_one(cancelled: list[str]) -> None:
    """What a loop round `asyncio.wait_for` does when its answer comes with the cancellation."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append("asked")
            if len(cancelled) > 1:
                raise


async def test_a_task_that_loses_a_cancellation_is_asked_again() -> None:
    cancelled: list[str] = []
    task = asyncio.create_task(_loses_one(cancelled))
    await asyncio.sleep(0)
    await cancel_and_wait([task], patience_s=0.01)
    assert task.cancelled()
    assert cancelled == ["asked"] * 2


async def test_a_task_that_does_not_end_is_left_and_named(caplog: pytest.LogCaptureFixture) -> None:
    release = asyncio.Event()

    async def deaf() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(deaf(), name="the deaf one")
    await asyncio.sleep(0)
    await cancel_and_wait([task], patience_s=0.01)
    assert not task.done()
    assert "the deaf one" in caplog.text
    release.set()
    await task


async def test_what_tasks_raised_before_they_are_ended_is_seen() -> None:
    async def fails() -> None:
        raise OSError("told to nobody")

    never_retrieved: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: never_retrieved.append(what["message"]))
    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await cancel_and_wait([task])
    assert task.done()
    del task
    gc.collect()
    assert never_retrieved == []


def test_a_process_that_the_second_signal_stops_leaves_with_1_and_no_stack() -> None:
    async def main() -> None:
        async with drain_on_signals() as drain:
            os.kill(os.getpid(), signal.SIGTERM)
            await drain.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(SystemExit) as stopped:
        run_to_end(main())
    assert stopped.value.code == 1
    assert stopped.value.__suppress_context__


def test_what_is_loaded_is_passed_over_and_what_is_young_looked_at_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(gc, "set_threshold", lambda *counts: done.append(counts))
    keep_what_is_loaded()
    assert done == ["freeze", (10_000, *gc.get_threshold()[1:])]
