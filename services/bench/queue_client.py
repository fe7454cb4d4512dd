"""A caller that costs next to nothing: one request a time over a kept connection, with the time of every event.

Written on a bare protocol: what arrives is stamped and kept, and read when the stream is over, since a client library's own
milliseconds would be told as the gateway's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

from shared.clock import SYSTEM
from shared.errors import Unavailable

CHAT: Final = "/v1/chat/completions"
EVENT_S: Final = 30.0
_END: Final = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A stream as it came. Monotonic nanoseconds."""

    sent_ns: int
    events: tuple[tuple[int, dict[str, Any]], ...]

    def first_text_ns(self) -> int:
        """When the first event came that has text. Raises Unavailable when none has."""
        for at_ns, told in self.events:
            choices: Any = told.get("choices") or ({},)
            if choices[0].get("delta", {}).get("content"):
                return at_ns
        raise Unavailable(f"a stream of {len(self.events)} events has no text")

    def first_text_ms(self) -> float:
        """From sending the request to that."""
        return (self.first_text_ns() - self.sent_ns) / 1e6

    def trace_id(self) -> str:
        """Of our own streams: their last event tells it."""
        return str(self.events[-1][1].get("burstline", {}).get("trace_id", ""))


class _Arrivals(asyncio.Protocol):
    """Pieces of one answer as the socket gave them, with their times."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def begin(self) -> None:
        """The next answer."""
        self.pieces, self._tail = [], b""
        self.over = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.pieces.append((SYSTEM.monotonic_ns(), data))
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END and not self.over.done():
            self.over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


class Connection:
    """To one server."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._key = parts.hostname or "", parts.port or 80, key

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, self._arrivals = await loop.create_connection(_Arrivals, self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()

    async def stream(self, body: dict[str, Any]) -> Timed:
        """Ask and read to the end. Raises Unavailable for any answer but a whole stream, and TimeoutError."""
        data = json.dumps(body).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self._arrivals.begin()
        sent_ns = SYSTEM.monotonic_ns()
        self._transport.write(head.encode() + data)
        async with asyncio.timeout(EVENT_S):
            await self._arrivals.over
        return Timed(sent_ns=sent_ns, events=tuple(_events(self._arrivals.pieces)))


def _events(pieces: list[tuple[int, bytes]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events of a chunked answer, each with the time of the piece that completes it. Raises Unavailable."""
    left = body = b""
    inside = False
    for at_ns, data in pieces:
        left += data
        if not inside:
            head, separator, rest = left.partition(b"\r\n\r\n")
            if not separator:
                continue
            status = head.split(b"\r\n", 1)[0].split(b" ", 1)[-1]
            if not status.startswith(b"200"):
                raise Unavailable(f"the server answered {status.decode()}")
            inside, left = True, rest
        chunks, left = _unchunked(left)
        *whole, body = (body + chunks).split(b"\n\n")
        for line in (line for block in whole for line in block.split(b"\n")):
            text = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and text != b"[DONE]":
                yield at_ns, json.loads(text)
    if not inside:
        raise Unavailable("the server closed the connection")


def _unchunked(data: bytes) -> tuple[bytes, bytes]:
    """What the whole chunks at the beginning of `data` hold, and the rest."""
    found = b""
    while True:
        size, separator, rest = data.partition(b"\r\n")
        length = int(size or b"0", 16) if separator else 0
        if not separator or len(rest) < length + 2:
            return found, data
        found, data = found + rest[:length], rest[length + 2 :]
        if not length:
            return found, data
