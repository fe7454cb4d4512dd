"""Serving an ASGI application inside a process that has its own signals and its own end (`lifecycle`)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import uvicorn

from shared.errors import Unavailable

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

START_S: Final = 30.0
_BACKLOG: Final = 2048


class _Server(uvicorn.Server):
    """uvicorn that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises Unavailable with the address when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


@asynccontextmanager
async def serve(
    app: Callable[..., Any],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    drain_s: float = 10.0,
    **options: Any,
) -> AsyncIterator[int]:
    """Serve `app` while the block runs; yields the port. On the way out open requests get `drain_s` seconds.

    `options` go to uvicorn.Config. Raises Unavailable when the address is taken or the application does not start.
    """
    listener = bind(host, port)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        **{"lifespan": "off", "ws": "none", **options},
    )
    server = _Server(config)
    serving = asyncio.create_task(_run(server, listener), name=f"http:{port}")
    try:
        await _started(server, serving)
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


async def _run(server: _Server, listener: socket.socket) -> None:
    """uvicorn leaves by SystemExit when the application does not start; here that is one task's failure."""
    try:
        await server.serve(sockets=[listener])
    except SystemExit as error:
        raise Unavailable("the application did not start; its own words are in the log") from error


async def _started(server: _Server, serving: asyncio.Task[None]) -> None:
    """Until the server accepts. uvicorn tells it by a flag alone, so it is looked at."""
    try:
        async with asyncio.timeout(START_S):
            while not server.started:
                if serving.done():
                    serving.result()
                    raise Unavailable("the HTTP server ended at once")
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise Unavailable(f"the HTTP server did not start within {START_S:g} s") from None
