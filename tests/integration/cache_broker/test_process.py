"""The broker as a process, with a real NATS and a real Postgres."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.embedded.ports import free_port
from shared.errors import Unavailable
from shared.protocol import codec, subjects
from shared.protocol.messages import Authenticate, Identity
from shared.transport.nats import connect

START_S = 90.0


@pytest.fixture
def broker(database_url: str, nats_url: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process and its health port."""
    port = free_port()
    environment = {
        **os.environ,
        "BURSTLINE_DATABASE_URL": database_url,
        "BURSTLINE_NATS_URL": nats_url,
        "BURSTLINE_DATA_DIR": str(tmp_path),
        "BURSTLINE_BROKER_HEALTH_PORT": str(port),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cache_broker"], env=environment, stderr=subprocess.PIPE
    )
    try:
        yield process, port
    finally:
        process.kill()
        process.communicate()


async def ready(port: int) -> bool:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200
        except httpx.TransportError:
            return False


async def test_it_migrates_serves_and_drains(
    broker: tuple[subprocess.Popen[bytes], int], nats_url: str
) -> None:
    process, port = broker
    async with asyncio.timeout(START_S):
        while not await ready(port):
            assert process.poll() is None
            await asyncio.sleep(0.1)
    transport = await connect(nats_url, name="test")
    call = codec.encode(Authenticate(key_digest="0" * 64))
    answer = await transport.request(subjects.broker(Authenticate), call, timeout=20)
    failure = codec.decode_as(Identity, answer).failure
    assert failure is not None
    assert failure.code == "invalid_api_key"
    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.to_thread(process.communicate, timeout=START_S)
    assert process.returncode == 0, log.decode()
    with pytest.raises(Unavailable):
        await transport.request(subjects.broker(Authenticate), call, timeout=1)
    await transport.close()


def test_without_a_database_it_says_which_setting_is_missing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BURSTLINE_")}
    done = subprocess.run(
        [sys.executable, "-m", "services.cache_broker"],
        env={**environment, "BURSTLINE_DATA_DIR": str(tmp_path)},
        capture_output=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.decode() == "broker: BURSTLINE_DATABASE_URL must be set\n"
