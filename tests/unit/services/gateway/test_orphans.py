"""Requests whose workers are gone for good end in a bounded time, and never run later."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.gateway.orphans import OrphanWatch
from shared.clock import ManualClock
from shared.errors import Unavailable
from shared.protocol import codec, subjects
from shared.protocol.messages import CancelRequest
from tests.unit.services.gateway.line import Line, Work, ids, running_line
from tests.waiting import until

SHORT = {"worker_silence_s": 0.3, "orphan_grace_s": 0.3, "quiet_s": 0.1}


class _Fleet:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.present = True
        self.online = True
        self.watch = OrphanWatch(
            "f" * 64, staffed=lambda _: self.present, hearing=self._hearing, clock=self.clock, grace_s=10
        )

    async def _hearing(self) -> bool:
        return self.online

    async def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1)
            await self.watch.check()


async def test_gone_workers_are_given_the_grace() -> None:
    fleet = _Fleet()
    await fleet.pass_s(60)
    fleet.present = False
    await fleet.pass_s(10)
    with pytest.raises(Unavailable) as raised:
        await fleet.pass_s(1)
    assert raised.value.code == "workers_gone"


@pytest.mark.parametrize("what", ["present", "online"])
async def test_the_grace_begins_anew(what: str) -> None:
    """After a worker came back, and after a time in which none could have been heard."""
    fleet = _Fleet()
    fleet.present = False
    await fleet.pass_s(9)
    setattr(fleet, what, what == "present")
    await fleet.pass_s(30)
    fleet.present, fleet.online = False, True
    await fleet.pass_s(10)
    with pytest.raises(Unavailable):
        await fleet.pass_s(1)


async def _nothing(work: Work) -> None:
    await work.cancelled.wait()


async def _half(work: Work) -> None:
    await work.start()
    await work.burst(ids("Hello"))
    await work.cancelled.wait()


async def _cancellation(line: Line) -> CancelRequest:
    """The journalled one of the line's first request."""
    request_id = line.worker.works[0].request.request_id
    await line.gateway.dispatcher.close()
    stored = line.server.streams[subjects.CANCELS.name].last(subjects.cancel(request_id))
    assert stored is not None
    return codec.decode_as(CancelRequest, stored.data)


@asynccontextmanager
async def _other_version_beats(line: Line, **changes: Any) -> AsyncIterator[None]:
    """Workers of the model go on, with other numerics."""

    async def beat() -> None:
        while True:
            line.gateway.fleet.note(line.worker.heartbeat(worker_id="w2", fingerprint="e" * 64, **changes))
            await asyncio.sleep(0.05)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


async def test_a_request_that_no_worker_took_is_refused_within_the_grace() -> None:
    async with running_line(**SHORT) as line:
        line.worker.script = _nothing
        request = asyncio.create_task(line.chat())
        await line.work()
        async with asyncio.timeout(10):
            answer = await request
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "workers_gone")
        assert answer.headers["retry-after"]
        assert (await _cancellation(line)).choice is None


async def test_a_stream_that_began_ends_in_band() -> None:
    async with running_line(**SHORT) as line:
        line.worker.script = _half
        stream = asyncio.create_task(line.chat(stream=True))
        await line.work()
        async with _other_version_beats(line, vocabulary_size=7), asyncio.timeout(10):
            answer = await stream
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        error: dict[str, Any] = json.loads(lines[-2].removeprefix("data: "))
        assert error["error"]["code"] == "workers_gone"
        assert lines[-1] == "data: [DONE]"
        assert any("Hello" in chunk for chunk in lines)
        assert (await _cancellation(line)).reason == "operator"


async def test_c1_7_a_request_waits_for_the_heirs_of_its_workers() -> None:
    async with running_line(**SHORT) as line:
        adopted = asyncio.Event()

        async def script(work: Work) -> None:
            await work.start()
            await work.burst(ids("Hello"))
            await adopted.wait()
            work.attempt = 2
            await work.start()
            await work.burst(ids(" there"))
            await work.end()

        line.worker.script = script
        request = asyncio.create_task(line.chat())
        await line.work()
        async with _other_version_beats(line):
            await until(lambda: not line.gateway.fleet.staffed(line.worker.heartbeat().fingerprint))
            assert line.gateway.fleet.has_heirs("pocket", line.worker.heartbeat().fingerprint)
            adopted.set()
            assert (await request).json()["choices"][0]["message"]["content"] == "Hello there"


async def test_a_worker_that_comes_back_in_time_goes_on() -> None:
    async with running_line(worker_silence_s=0.2, orphan_grace_s=20, quiet_s=0.1) as line:
        back = asyncio.Event()

        async def script(work: Work) -> None:
            await work.start()
            await work.burst(ids("Hello"))
            await back.wait()
            line.gateway.fleet.note(line.worker.heartbeat())
            await work.burst(ids(" there"))
            await work.end()

        line.worker.script = script
        request = asyncio.create_task(line.chat())
        await line.work()
        await until(lambda: not line.gateway.fleet.staffed(line.worker.heartbeat().fingerprint))
        back.set()
        assert (await request).json()["choices"][0]["message"]["content"] == "Hello there"
