"""The proxy passes bytes, cuts and slows connections, and outlives a server that is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from services.chaos.front import Front

URL = "nats://user:secret@127.0.0.1:{}"


class Echo:
    """Answers what it hears, and knows which connections are open."""

    def __init__(self) -> None:
        self.open: set[asyncio.Task[None]] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        task.add_done_callback(self.open.discard)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.fixture
async def behind() -> AsyncIterator[tuple[Front, int]]:
    """A front before an echo server, and its port. No connection outlives the loop."""
    echo = Echo()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    front = Front()
    url = urlsplit(await front.open(URL.format(server.sockets[0].getsockname()[1])))
    assert (url.username, url.password) == ("user", "secret")
    assert url.port is not None
    yield front, url.port
    await front.close()
    server.close()
    async with asyncio.timeout(10):
        await asyncio.gather(*echo.open)


async def _say(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    assert await asyncio.wait_for(reader.readexactly(len(data)), 10) == data
    return reader, writer


async def test_a_cut_ends_every_connection_and_takes_new_ones(behind: tuple[Front, int]) -> None:
    front, port = behind
    connections = [await _say(port, b"hello") for _ in range(2)]
    assert front.cut() == 2
    for reader, writer in connections:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 10)
        writer.close()
    _, writer = await _say(port, b"again")
    writer.close()


async def test_a_slow_front_passes_everything_in_order(behind: tuple[Front, int]) -> None:
    front, port = behind
    front.delay_s = 0.001
    _, writer = await _say(port, bytes(range(256)) * 8)
    writer.close()


async def test_without_a_server_a_connection_ends(unused_port: int) -> None:
    front = Front()
    url = urlsplit(await front.open(URL.format(unused_port)))
    reader, writer = await asyncio.open_connection("127.0.0.1", url.port)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 10)
    writer.close()
    await front.close()


@pytest.fixture
async def unused_port() -> int:
    """A port that was free a moment ago."""
    server = await asyncio.start_server(Echo(), "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port
