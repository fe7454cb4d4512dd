"""A caller that costs next to nothing: one request a time over a kept connection, with the time of every event.

Written on plain streams, since a client library's own milliseconds would be told as the gateway's.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

from shared.clock import SYSTEM
from shared.errors import Unavailable

CHAT: Final = "/v1/chat/completions"
EVENT_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A stream as it came. Monotonic nanoseconds."""

    sent_ns: int
    events: tuple[tuple[int, dict[str, Any]], ...]

    def first_text_ms(self) -> float:
        """From sending the request to the first event that has text. Raises Unavailable when none has."""
        for at_ns, told in self.events:
            choices: Any = told.get("choices") or ({},)
            if choices[0].get("delta", {}).get("content"):
                return (at_ns - self.sent_ns) / 1e6
        raise Unavailable(f"a stream of {len(self.events)} events has no text")


class Connection:
    """To one server."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._key = parts.hostname or "", parts.port or 80, key

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def stream(self, body: dict[str, Any]) -> Timed:
        """Ask and read to the end. Raises Unavailable for any answer but a stream."""
        data = json.dumps(body).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        sent_ns = SYSTEM.monotonic_ns()
        self._writer.write(head.encode() + data)
        async with asyncio.timeout(EVENT_S):
            status = (await self._reader.readline()).split()
            while (await self._reader.readline()).strip():
                pass
            if len(status) < 2 or status[1] != b"200":
                raise Unavailable(f"the server answered {b' '.join(status).decode()}")
            return Timed(sent_ns=sent_ns, events=tuple(await self._events()))

    async def _events(self) -> list[tuple[int, dict[str, Any]]]:
        """Of a chunked body; an event may span chunks."""
        events: list[tuple[int, dict[str, Any]]] = []
        left = b""
        while size := int((await self._reader.readline()).strip() or b"0", 16):
            left += await self._reader.readexactly(size)
            await self._reader.readexactly(2)
            now = SYSTEM.monotonic_ns()
            *whole, left = left.split(b"\n\n")
            for block in whole:
                for line in block.split(b"\n"):
                    text = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and text != b"[DONE]":
                        events.append((now, json.loads(text)))
        await self._reader.readline()
        return events
