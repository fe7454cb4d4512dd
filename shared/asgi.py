"""Serving an ASGI application inside a process that has its own signals and its own end (`lifecycle`)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from shared.errors import Unavailable

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

START_S: Final = 30.0
HEAD_S: Final = 15.0
_BACKLOG: Final = 2048


_TWO_LENGTHS: Final = (
    b'{"error":{"message":"a request with both Content-Length and Transfer-Encoding","type":"invalid_request_error",'
    b'"param":null,"code":"two_lengths"}}'
)


class _Server(uvicorn.Server):
    """uvicorn that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Gathered:
    """A transport that writes what one turn of the event loop gives it in one call, at the turn's end, and that is not closed
    on a caller who is still sending.

    uvicorn writes each message of a response by itself, the head and the first event, an event and the next, and every
    such call may cost the processor, which the reader that it wakes takes over.

    A socket that is closed with bytes unread resets the connection, and the caller may lose the answer that says what is
    wrong with them (a body over the limit). So our side ends, and the caller's is read and forgotten until it ends too.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, *, sends: Callable[[], bool]
    ) -> None:
        """`sends`: whether the caller is in the middle of a body."""
        self._transport: Final = transport
        self._loop: Final = loop
        self._sends: Final = sends
        self._pieces: list[bytes] = []
        self.ended = False
        """Our side has; what still comes is nobody's."""

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        self._flush()
        if self.ended or not self._sends() or self._transport.is_closing():
            self._transport.close()
            return
        self.ended = True
        self._transport.write_eof()
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self.ended or self._transport.is_closing()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self.ended:
            self._transport.write(b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        """All else is the transport's own."""
        return getattr(self._transport, name)


class _Connection(H11Protocol):
    """A connection that is closed when it owes a request for longer than `head_s`.

    uvicorn waits for ever for the rest of a request's head, and for the rest of a body whose answer is sent: a caller that
    sends a byte now and then, or none, would hold a descriptor without ever showing a key.
    """

    head_s = HEAD_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._late: asyncio.TimerHandle | None = None
        self._gathered = _Gathered(transport, self.loop, sends=self._caller_sends)
        super().connection_made(self._gathered)  # type: ignore[arg-type]
        self._watch()

    def data_received(self, data: bytes) -> None:
        if not self._gathered.ended:
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _caller_sends(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """The time runs from when a request could have come, not from the last byte."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._late is None and (self._gathered.ended or not self.transport.is_closing()):
            self._late = self.loop.call_later(self.head_s, self.transport.abort)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def one_length(app: Callable[..., Any]) -> Application:
    """`app`, which never sees a request that tells its length in two ways.

    A proxy that believes the other one takes part of the body for the next request, and the next caller gets its answer
    (request smuggling). Refused with 400, and the connection ends. Differing Content-Lengths the parser refuses so itself.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            names = {name for name, _ in scope["headers"]}
            if b"content-length" in names and b"transfer-encoding" in names:
                await _refuse_two_lengths(send)
                return
        await app(scope, receive, send)

    return guarded


async def _refuse_two_lengths(send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(_TWO_LENGTHS)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": _TWO_LENGTHS})


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises Unavailable with the address when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio turns Nagle's algorithm off only for sockets that say they are TCP, and with it on
    # the second small write of a response waits for the reader's delayed acknowledgement, 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
    head_s: float = HEAD_S,
    **options: Any,
) -> AsyncIterator[int]:
    """Serve `app` while the block runs; yields the port. On the way out open requests get `drain_s` seconds. A connection
    that sends no whole request head within `head_s` is closed.

    `options` go to uvicorn.Config. Raises Unavailable when the address is taken or the application does not start.
    """
    listener = bind(host, port)
    config = uvicorn.Config(
        one_length(app),
        http=type("_Connection", (_Connection,), {"head_s": head_s}),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
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
