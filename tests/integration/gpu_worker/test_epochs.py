"""A worker that stood still for longer than the broker waits: it begins a new epoch and goes on caching."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from sqlalchemy import select

from services.cache_broker.models import Worker
from tests.integration.gpu_worker.books import SYSTEM_PROMPT, Broker, balanced, broker, turn
from tests.integration.gpu_worker.process import DEADLINE_S, Client, free_port, metric, worker_process

PROMPT = SYSTEM_PROMPT + (7,) * 60
LIMITS = {"alive_after_s": 1.0, "reap_after_s": 2.0, "sweep_interval_s": 0.3}


async def _reaped(line: Broker, worker: str) -> None:
    """Until the broker declared the worker dead."""

    async def look() -> object:
        statement = select(Worker.reaped).where(Worker.id == worker)
        return await line.database.run(lambda c: c.scalar(statement))

    async with asyncio.timeout(DEADLINE_S):
        while await look() is None:  # noqa: ASYNC110 - the condition is a row in the database
            await asyncio.sleep(0.05)


async def _renewed(port: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await asyncio.to_thread(metric, port, "burstline_worker_epochs_lost_total") < 1:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def test_a_worker_that_was_reaped_while_it_lived_caches_again(
    migrated_url: str, nats_url: str, client: Client, tiny_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    settings = {"health_port": str(port), "heartbeat_s": "0.2"}
    async with broker(migrated_url, client, **LIMITS) as line:
        tenant = await line.tenant("one", 64 << 20)
        with worker_process(nats_url, tmp_path, tiny_model, "w1", **settings) as process:
            await client.find_worker("w1")
            first, _ = await turn(client, "first", tenant, PROMPT)
            os.kill(process.pid, signal.SIGSTOP)
            try:
                await _reaped(line, "w1")
            finally:
                os.kill(process.pid, signal.SIGCONT)
            await _renewed(port)
            again, cold = await turn(client, "again", tenant, PROMPT)
            third, warm = await turn(client, "third", tenant, PROMPT)
            report = await line.audit()
            lost = await asyncio.to_thread(metric, port, "burstline_worker_epochs_lost_total")
    assert first == again == third
    assert (cold.cached_tokens, cold.cache_decision) == (0, "miss")
    assert (warm.cached_tokens, warm.cache_decision) == (192, "hit")
    balanced(report)
    assert lost == 1
