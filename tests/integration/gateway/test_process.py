"""The gateway as a process, on a real NATS server: starts, serves, drains on SIGTERM, refuses bad settings."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from shared.asgi import bind
from shared.protocol import codec, subjects
from shared.transport.nats import NatsTransport, connect
from tests.subjects import BROKER_CALLS
from tests.unit.services.gateway.line import HEADERS, FakeBroker, FakeWorker, Work, ids
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
BODY = {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}]}


def environment(nats_url: str, folder: Path, port: int, **more: str) -> dict[str, str]:
    """Of a gateway that listens on `port`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BURSTLINE_")}
    return kept | {
        "BURSTLINE_NATS_URL": nats_url,
        "BURSTLINE_DATA_DIR": str(folder),
        "BURSTLINE_GATEWAY_PORT": str(port),
        **more,
    }


def free_port() -> int:
    listener = bind("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    listener.close()
    return port


@asynccontextmanager
async def process(env: Mapping[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A gateway; killed at the end if it still runs."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", cwd=ROOT, env=dict(env), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            running.kill()
        await running.communicate()


@asynccontextmanager
async def line(nats_url: str) -> AsyncIterator[tuple[FakeBroker, FakeWorker]]:
    """The scripted broker and worker on real NATS; the worker's heart beats."""
    transport: NatsTransport = await connect(nats_url, name="line")
    broker, worker = FakeBroker(), FakeWorker(transport)
    for spec in subjects.STREAMS:
        await transport.ensure_stream(spec)
    await transport.serve(BROKER_CALLS, subjects.BROKER_QUEUE, broker.answer, concurrency=8)

    async def beat() -> None:
        while True:
            await transport.publish(subjects.heartbeat(worker.worker_id), codec.encode(worker.heartbeat()))
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(worker.run()), asyncio.create_task(beat())]
    try:
        yield broker, worker
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await transport.close()


async def ready(client: httpx.AsyncClient) -> None:
    """Until /readyz says so."""

    async def look() -> bool:
        with suppress(httpx.TransportError):
            return (await client.get("/readyz")).status_code == 200
        return False

    await until(look, within_s=60, every_s=0.1)


async def test_fr_124_sigterm_fails_readiness_and_lets_the_stream_finish(
    nats_url: str, tmp_path: Path
) -> None:
    port = free_port()
    env = environment(nats_url, tmp_path, port, BURSTLINE_GATEWAY_DRAIN_NOTICE_S="1")
    async with (
        line(nats_url) as (_, worker),
        process(env) as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=60) as client,
    ):
        await ready(client)
        assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
        release = asyncio.Event()

        async def held(work: Work) -> None:
            await work.start()
            await work.burst(ids("Hello"))
            await release.wait()
            await work.burst(ids(" there"))
            await work.end()

        worker.script = held
        async with client.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as stream:
            lines = stream.aiter_lines()
            async for row in lines:
                if "Hello" in row:
                    break
            running.send_signal(signal.SIGTERM)

            async def draining() -> bool:
                return (await client.get("/readyz")).json()["reasons"].get("drain") == "draining"

            await until(draining, within_s=20)
            release.set()
            rest = [row async for row in lines]
        assert any(" there" in row for row in rest)
        assert "data: [DONE]" in rest
        async with asyncio.timeout(30):
            assert await running.wait() == 0


async def test_a_killed_reader_cancels_over_nats(nats_url: str, tmp_path: Path) -> None:
    port = free_port()
    async with (
        line(nats_url) as (_, worker),
        process(environment(nats_url, tmp_path, port)),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=60) as client,
    ):
        await ready(client)

        async def endless(work: Work) -> None:
            await work.start()
            await work.burst(ids("Hello"))
            await work.cancelled.wait()
            await work.end("cancelled", cancel_reason="client_disconnected")

        worker.script = endless
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=BODY, timeout=httpx.Timeout(30, read=0.5))
        async with asyncio.timeout(10):
            await worker.busy.wait()
            await worker.works[0].cancelled.wait()
        assert worker.works[0].cancels[0].reason == "client_disconnected"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("BURSTLINE_GATEWAY_PORT", "http", "BURSTLINE_GATEWAY_PORT"),
        ("BURSTLINE_GATEWAY_KEEPALIVE_S", "5", "BURSTLINE_GATEWAY_KEEP_ALIVE_S"),
        ("BURSTLINE_GATEWAY_MODELS", "x=/nowhere", "config.json"),
    ],
)
async def test_bad_settings_stop_the_process_by_name(
    tmp_path: Path, name: str, value: str, told: str
) -> None:
    env = environment("nats://127.0.0.1:1", tmp_path, 0) | {name: value}
    async with process(env) as running:
        async with asyncio.timeout(60):
            _, errors = await running.communicate()
        assert running.returncode not in (0, None)
        assert told in errors.decode()
