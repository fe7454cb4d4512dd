"""A stream whose gateway dies goes on at another one, and its key never runs a second request (real NATS, two processes)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.integration.gateway.test_process import BODY, environment, free_port, line, process, ready
from tests.unit.services.gateway.line import HEADERS, Work, words

TEXT = "One two three four five six seven eight nine ten."


async def _events(rows: AsyncIterator[str]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """(id, data) of the events that have ids, until the connection ends or breaks."""
    name = ""
    with suppress(httpx.RemoteProtocolError, httpx.ReadError):
        async for row in rows:
            if row.startswith("id: "):
                name = row[4:]
            elif row.startswith("data: {"):
                yield name, json.loads(row[6:])


def _text(events: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(data["choices"][0]["delta"].get("content", "") for _, data in events)


async def test_fr_47_fr_68_a_killed_gateways_stream_goes_on_at_another(nats_url: str, tmp_path: Path) -> None:
    ports = (free_port(), free_port())
    keyed = HEADERS | {"idempotency-key": "one"}
    body = BODY | {"stream": True}
    async with (
        line(nats_url) as (_, worker),
        process(environment(nats_url, tmp_path / "a", ports[0])) as first,
        process(environment(nats_url, tmp_path / "b", ports[1])),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", headers=keyed, timeout=60) as one,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[1]}", headers=keyed, timeout=60) as other,
    ):
        await asyncio.gather(ready(one), ready(other))
        half, go = asyncio.Event(), asyncio.Event()

        async def script(work: Work) -> None:
            bursts = words(TEXT, size=3)
            await work.start()
            for place, burst in enumerate(bursts):
                if place == len(bursts) // 2:
                    half.set()
                    await go.wait()
                await work.burst(burst)
            await work.end()

        worker.script = script
        got: list[tuple[str, dict[str, Any]]] = []
        async with one.stream("POST", "/v1/chat/completions", json=body) as stream:
            request = stream.headers["x-burstline-request-id"]
            async for found in _events(stream.aiter_lines()):
                got.append(found)
                if len(got) == 3:
                    first.kill()
        await half.wait()
        after = {"last-event-id": got[-1][0]}
        async with other.stream("POST", "/v1/chat/completions", json=body, headers=after) as stream:
            assert stream.headers["x-burstline-request-id"] == request
            go.set()
            rest = [found async for found in _events(stream.aiter_lines())]
        assert _text(got + rest) == TEXT
        assert len({name for name, _ in got + rest}) == len(got + rest)
        async with other.stream("GET", f"/v1/streams/{request}", headers=after) as stream:
            assert _text([found async for found in _events(stream.aiter_lines())]) == _text(rest)
        whole = (await other.post("/v1/chat/completions", json=BODY)).json()
        assert whole["choices"][0]["message"]["content"] == TEXT
        assert len(worker.works) == 1
        assert worker.works[0].cancels == []
