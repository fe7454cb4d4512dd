"""Every test of the transport's contract runs twice: on NATS, and on its twin in memory."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from shared.transport.base import Transport
from shared.transport.memory import MemoryServer
from shared.transport.nats import connect
from tests.contract.transport import World


@pytest.fixture(params=["memory", "nats"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    opened: list[Transport] = []
    server = MemoryServer()
    url = request.getfixturevalue("session_nats_url") if request.param == "nats" else ""

    async def open_() -> Transport:
        opened.append(await connect(url, name="contract") if url else server.transport())
        return opened[-1]

    yield World(open=open_, prefix=secrets.token_hex(6), transport=await open_())
    for transport in opened:
        await transport.close()
