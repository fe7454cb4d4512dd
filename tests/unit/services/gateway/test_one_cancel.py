"""One cancellation for a caller who leaves, in whatever phase its request is; none for one who stays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.protocol import subjects
from tests.unit.services.gateway.line import Line, Work, ids, says
from tests.unit.services.gateway.test_disconnect import CHAT, Caller
from tests.waiting import until

PHASES = ("queued", "claimed", "first_burst", "later_burst", "publishing")


def _script(phase: str, reached: asyncio.Event) -> Any:
    """A worker that stands still in a phase until it is cancelled."""

    async def script(work: Work) -> None:
        if phase != "queued":
            await work.start()
        bursts = {"first_burst": 1, "later_burst": 4, "publishing": 6}.get(phase, 0)
        for _ in range(bursts):
            await work.burst(ids("Hello"))
        reached.set()
        await work.cancelled.wait()
        await work.end(
            "length" if phase == "publishing" else "cancelled", cancel_reason=work.cancels[0].reason
        )

    return script


def _cancels(line: Line) -> int:
    return len(list(line.server.streams[subjects.CANCELS.name].after(0)))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", PHASES)
async def test_c2_who_leaves_sends_exactly_one_cancellation(line: Line, phase: str, stream: bool) -> None:
    reached = asyncio.Event()
    line.worker.script = _script(phase, reached)
    caller = Caller(
        line, CHAT, {"model": "pocket", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    )
    async with asyncio.timeout(10):
        await reached.wait()
    work = await line.work()
    await caller.leave()
    async with asyncio.timeout(10):
        await work.cancelled.wait()
    await until(lambda: line.gateway.slots.in_flight == 0)
    assert [cancel.reason for cancel in work.cancels] == ["client_disconnected"]
    assert _cancels(line) == 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_c2_who_stays_sends_none(line: Line, stream: bool) -> None:
    line.worker.script = says("Hello there.")
    for _ in range(3):
        assert (await line.chat(stream=stream)).status_code == 200
    assert _cancels(line) == 0
