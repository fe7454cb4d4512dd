"""The journal's stream is full while a request runs: nothing is computed in vain, it is told, and it heals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from shared.protocol import subjects
from tests.integration.gpu_worker.process import (
    DEADLINE_S,
    Client,
    free_port,
    metric,
    readiness,
    worker_process,
)
from tests.unit.services.gpu_worker.scripted import ScriptedBroker

PROMPT = tuple(3 + (5 * position) % 500 for position in range(100))


@asynccontextmanager
async def _full(client: Client) -> AsyncIterator[None]:
    """The stream of journals takes nothing while the block runs."""
    await client.transport.ensure_stream(replace(subjects.JOURNAL, max_bytes=1))
    try:
        yield
    finally:
        await client.transport.ensure_stream(subjects.JOURNAL)


def _reasons(port: int) -> dict[str, str]:
    """Why the worker is not ready."""
    return dict(json.loads(readiness(port)[1])["reasons"])


async def test_a_worker_whose_journal_is_full_says_so_stops_computing_and_ends_the_request_later(
    nats_url: str, client: Client, broker: ScriptedBroker, tiny_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    settings = {"health_port": str(port), "journal_patience_s": "1", "max_attempts": "5"}
    with worker_process(nats_url, tmp_path, tiny_model, "w1", **settings):
        await client.find_worker("w1")
        await client.enqueue(client.request("full", PROMPT, max_tokens=400))
        await client.until("full", lambda state: min(state.offsets) >= 20)
        async with _full(client), asyncio.timeout(DEADLINE_S):
            while "journal" not in await asyncio.to_thread(_reasons, port):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
            computed = await asyncio.to_thread(metric, port, "burstline_worker_tokens_total")
            while await asyncio.to_thread(metric, port, "burstline_worker_requests_total") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert await asyncio.to_thread(metric, port, "burstline_worker_tokens_total") == computed
        state, terminal = await client.ended("full")
        assert terminal.failure is None
        await client.enqueue(client.request("whole", PROMPT, max_tokens=400))
        whole, _ = await client.ended("whole")
        assert state.tokens == whole.tokens
        assert await asyncio.to_thread(_reasons, port) == {}
