"""The queue with its streams, a scripted broker on it, and one small random model for the session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gpu_worker.engine.models.random import write_random_model
from shared.protocol import subjects
from shared.transport.nats import connect
from tests.integration.gpu_worker.process import Client
from tests.unit.services.gpu_worker.scripted import ScriptedBroker


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Client]:
    transport = await connect(nats_url, name="test")
    for spec in subjects.STREAMS:
        await transport.ensure_stream(spec)
    yield Client(transport)
    await transport.close()


@pytest.fixture
async def broker(client: Client) -> AsyncIterator[ScriptedBroker]:
    scripted = ScriptedBroker(client.transport)
    await scripted.start()
    yield scripted
    await scripted.stop()
