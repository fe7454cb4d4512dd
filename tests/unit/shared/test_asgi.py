"""The HTTP server's patience with connections that owe a request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from shared.asgi import bind, serve

REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
REFUSED_BODY = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n{"
LIMIT_S = 20.0


class Slow:
    """Answers when told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.asked.set()
        await self.go.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


async def drip(writer: asyncio.StreamWriter) -> None:
    """A header that never ends, a byte at a time."""
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo", REQUEST + b"GET /", REFUSED_BODY])
async def test_a_connection_that_owes_a_request_is_closed_however_it_drips(sent: bytes) -> None:
    app = Slow()
    app.go.set()
    async with serve(app, head_s=0.2) as port, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        dripping = asyncio.create_task(drip(writer)) if sent else None
        try:
            with contextlib.suppress(ConnectionError):  # cut or closed, both will do; open is a time-out
                while await reader.read(1000):
                    pass
        finally:
            if dripping is not None:
                dripping.cancel()
                await asyncio.gather(dripping, return_exceptions=True)
            writer.close()


async def test_a_long_answer_is_not_hurried_and_the_connection_serves_again() -> None:
    app = Slow()
    async with serve(app, head_s=0.2) as port, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(REQUEST)
            await app.asked.wait()
            await asyncio.sleep(0.5)  # over the patience for heads: it must not matter here
            app.go.set()
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            app.asked.clear()
            app.go.clear()
        writer.close()


CHUNKED = b"Transfer-Encoding: chunked\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 5\r\n" + CHUNKED,
        CHUNKED + b"Content-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5, 6\r\n",
        CHUNKED + CHUNKED,
    ],
)
async def test_a_request_with_two_lengths_is_refused_and_nothing_after_it_is_read(lengths: bytes) -> None:
    app = Slow()
    app.go.set()
    async with serve(app) as port, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\n" + lengths + b"\r\n0\r\n\r\n" + SMUGGLED)
        answer = await reader.read()  # to the end: the connection is closed
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert not app.asked.is_set()


async def test_a_length_told_twice_alike_is_one_length() -> None:
    app = Slow()
    app.go.set()
    async with serve(app) as port, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n.")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_accepted_connection_sends_small_writes_at_once() -> None:
    """asyncio turns Nagle's algorithm off by what the listener says of itself; else each first token waits 40 ms."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def meet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(
            writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        )
        writer.close()
        await writer.wait_closed()
        over.set()

    over = asyncio.Event()
    listener = bind("127.0.0.1", 0)
    async with await asyncio.start_server(meet, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        assert await asyncio.wait_for(accepted, 10)
        writer.close()
        await writer.wait_closed()
        await asyncio.wait_for(over.wait(), 10)


async def test_a_caller_who_is_still_sending_a_refused_body_reads_why() -> None:
    """Many clients send all of it before they read, on a connection that is to be closed; a reset would take the answer."""
    app = Slow()
    app.go.set()
    size = 32 << 20  # more than the buffers of both sides
    head = b"POST / HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size
    async with serve(app) as port, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        await app.asked.wait()
        for _ in range(size >> 20):
            writer.write(bytes(1 << 20))
            await writer.drain()
        assert (await reader.read()).endswith(b"ok")
        writer.close()


async def test_a_caller_who_never_stops_sending_a_refused_body_is_cut() -> None:
    app = Slow()
    app.go.set()
    head = b"POST / HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: 1000000\r\n\r\n"
    async with serve(app, head_s=0.3) as port, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        assert (await reader.read()).endswith(b"ok")
        with pytest.raises(ConnectionError):
            await drip(writer)
        writer.close()
