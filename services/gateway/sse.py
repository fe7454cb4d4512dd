"""Server-sent events: headers at once, comments while nothing happens (FR-52), always an end (FR-47)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec
from starlette.types import Send

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encoder: Final = msgspec.json.Encoder()


def event(data: object, *, name: str | None = None) -> bytes:
    """One event; `name` becomes its id, from which a reader can resume."""
    head = f"id: {name}\n".encode() if name is not None else b""
    return head + b"data: " + _encoder.encode(data) + b"\n\n"


class EventNames:
    """Ids of events: choice.token.sub-event, and after commas where the other choices are (a reader has one last id).

    Tokens = those of the choice taken in when the event was made. How many events there are depends on the bursts; what
    a reader has who knows an id does not, so any gateway can go on from it.
    """

    def __init__(self, seen: Mapping[int, tuple[int, int]] | None = None) -> None:
        """`seen`: choice -> (token, sub-event) that the reader has."""
        self._seen: Final = dict(seen or {})
        self._last: dict[int, tuple[int, int]] = {}

    def name(self, choice: int, position: int) -> str | None:
        """The next event's id; None if the reader has it."""
        last, sub = self._last.get(choice, (-1, 0))
        mark = (position, sub + 1 if last == position else 0)
        self._last[choice] = mark
        if mark <= self._seen.get(choice, (-1, 0)):
            return None
        self._seen[choice] = mark
        others = [f"{other}.{at}.{sub}" for other, (at, sub) in self._seen.items() if other != choice]
        return ",".join([f"{choice}.{mark[0]}.{mark[1]}", *others])


class EventStream:
    """A response that is being streamed."""

    def __init__(self, send: Send, *, keep_alive_s: float) -> None:
        self._send: Final = send
        self._keep_alive_s: Final = keep_alive_s
        self._loop: Final = asyncio.get_running_loop()
        self._written_at = self._loop.time()

    async def open(self) -> None:
        """Send the headers now, and a comment so that proxies pass them on."""
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._write(KEEP_ALIVE)

    async def relay(self, chunks: AsyncIterator[bytes]) -> None:
        """Write what `chunks` yields, and a comment whenever it yields nothing for the interval."""
        keeping = asyncio.create_task(self._keep_alive())
        try:
            async for chunk in chunks:
                await self._write(chunk)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep_alive(self) -> None:
        """Until cancelled. A write is whole before another task can make the next, so a comment cuts no event."""
        while True:
            quiet_s = self._loop.time() - self._written_at
            if quiet_s >= self._keep_alive_s:
                await self._write(KEEP_ALIVE)
            else:
                await asyncio.sleep(self._keep_alive_s - quiet_s)

    async def fail(self, body: dict[str, Any]) -> None:
        """An error after the headers: in band."""
        await self._write(event(body))

    async def close(self) -> None:
        """The end mark, and the end."""
        await self._send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _write(self, data: bytes) -> None:
        self._written_at = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
