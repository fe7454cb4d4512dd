"""Callers who leave: every phase is cancelled, and everything is given back."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware

from services.gateway.connection import CallerGone, while_connected
from services.gateway.openapi import Application
from tests.unit.services.gateway.line import HEADERS, Line, Work, running_line, until_cancelled

CHAT = "/v1/chat/completions"


class Caller:
    """A caller that sends a request, and leaves when told."""

    def __init__(self, line: Line, path: str, body: dict[str, Any], *, key: str | None = None) -> None:
        self._body = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.got = asyncio.Event()
        headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        keyed = [] if key is None else [(b"idempotency-key", key.encode())]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [*headers, (b"content-type", b"application/json"), *keyed],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(line.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return self._body.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if b'"content":"H' in message.get("body", b"") or b'"text":"H' in message.get("body", b""):
            self.got.set()

    async def leave(self) -> None:
        """Close the connection; the application has ended when this returns."""
        self._gone.set()
        async with asyncio.timeout(10):
            await self.task


def _at_rest(line: Line) -> None:
    """C6: no slot is taken and the only subscriptions left are those of the line itself."""
    assert line.gateway.slots.in_flight == 0
    assert [known.pattern for known in line.server.listeners if known.pattern.startswith("tok.")] == []


@pytest.mark.parametrize("stream", [True, False])
async def test_fr_69_fr_70_leaving_cancels_the_worker(line: Line, stream: bool) -> None:
    line.worker.script = until_cancelled
    caller = Caller(
        line, CHAT, {"model": "pocket", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    )
    work = await line.work()
    if stream:
        async with asyncio.timeout(10):
            await caller.got.wait()
    await caller.leave()
    async with asyncio.timeout(10):
        await work.cancelled.wait()
    assert work.cancels[0].reason == "client_disconnected"
    assert stream or caller.sent == []
    _at_rest(line)


async def test_fr_76_leaving_before_the_first_token_cancels_too(line: Line) -> None:
    async def silent(work: Work) -> None:
        await work.cancelled.wait()

    line.worker.script = silent
    caller = Caller(
        line, CHAT, {"model": "pocket", "messages": [{"role": "user", "content": "x"}], "stream": True}
    )
    work = await line.work()
    await caller.leave()
    async with asyncio.timeout(10):
        await work.cancelled.wait()
    _at_rest(line)


async def test_leaving_during_the_lookup_never_enqueues() -> None:
    async with running_line(lookup_timeout_s=30) as line:
        line.broker.delay_s = 0.0
        assert (await line.chat()).status_code == 200  # the key is known from here on
        line.broker.delay_s = 30.0
        line.broker.asked.clear()
        long = "A prompt of more than one block. " * 20
        caller = Caller(line, "/v1/completions", {"model": "pocket", "prompt": long})
        async with asyncio.timeout(10):
            await line.broker.asked.wait()
        await caller.leave()
        assert len(line.worker.works) == 1
        _at_rest(line)


async def test_fr_119_a_hundred_leaving_streams_end_every_span_once(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    line.worker.script = until_cancelled
    body = {"model": "pocket", "messages": [{"role": "user", "content": "x"}], "stream": True}
    callers = [Caller(line, CHAT, body) for _ in range(100)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(caller.got.wait() for caller in callers))
        await asyncio.gather(*(caller.leave() for caller in callers))
    roots = [span for span in line.spans.get_finished_spans() if span.name == f"POST {CHAT}"]
    assert len(roots) == 100
    assert len({span.context.span_id for span in line.spans.get_finished_spans()}) == len(
        line.spans.get_finished_spans()
    )
    assert all(span.attributes and span.attributes["burstline.cancelled"] for span in roots)
    assert "different Context" not in caplog.text
    _at_rest(line)


async def test_fr_71_no_base_http_middleware_in_the_stack(line: Line) -> None:
    layer, seen = line.app, []
    while layer is not None:
        if isinstance(layer, Application):
            layer = layer.build_middleware_stack()
        seen.append(type(layer))
        layer = getattr(layer, "app", None) or getattr(layer, "_app", None)
    assert "Surround" in {kind.__name__ for kind in seen}
    assert not any(issubclass(kind, BaseHTTPMiddleware) for kind in seen)


async def test_work_has_ended_when_the_caller_is_known_to_be_gone() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(CallerGone):
        await while_connected(receive, work())
    assert ended == [True]


async def test_a_fault_of_the_work_comes_through() -> None:
    async def work() -> None:
        raise ValueError("mine")

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    with pytest.raises(ValueError, match="mine"):
        await while_connected(receive, work())


@pytest.mark.parametrize("fault", [None, ValueError("mine")])
async def test_a_caller_who_leaves_in_the_turn_in_which_the_work_ends_cancels_nothing(
    fault: Exception | None,
) -> None:
    loop = asyncio.get_running_loop()
    gone, done = loop.create_future(), loop.create_future()

    async def work() -> None:
        await done
        if fault is not None:
            raise fault

    async def call() -> int:
        with nullcontext() if fault is None else pytest.raises(ValueError, match="mine"):
            await while_connected(lambda: gone, work())
        task = asyncio.current_task()
        assert task is not None
        await asyncio.sleep(0)  # a cancellation would come here
        return task.cancelling()

    calling = asyncio.create_task(call())
    for _ in range(3):
        await asyncio.sleep(0)
    gone.set_result({"type": "http.disconnect"})
    done.set_result(None)
    assert await calling == 0
