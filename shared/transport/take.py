"""Taking one message from any of many durable consumers, without waiting for one to come.

One inbox for all of them, and one request at a time: a message comes under its own subject, so only the order tells whose
answer it is. What comes after its request was given up is kept for the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from shared.errors import Unavailable
from shared.protocol.subjects import ConsumerSpec
from shared.transport.base import Delivery
from shared.transport.pull import WireDelivery, send_pull
from shared.transport.wire import Closer, NobodyListens, Raw, Unanswered, Wire

_ANSWER_S: Final = 2.0
_GONE: Final = ("409", "503")  # the consumer was deleted; there is none


class Taker:
    """Of one connection. `make` makes a consumer, and its stream, when the server has none."""

    def __init__(self, wire: Wire, make: Callable[[ConsumerSpec], Awaitable[None]]) -> None:
        self._wire = wire
        self._make = make
        self._prefix = wire.inbox()
        self._ready: deque[Raw] = deque()
        self._statuses: deque[Raw] = deque()
        self._changed = asyncio.Event()
        self._one = asyncio.Lock()
        self._listening: Closer | None = None
        self._asked = 0

    async def take(self, spec: ConsumerSpec, *, priority: int) -> Delivery | None:
        """A message, or None when there is none now. Raises Unavailable."""
        async with self._one:
            if self._listening is None:
                self._listening = await self._wire.listen(f"{self._prefix}.*", self._receive)
            try:
                raw = await self._ask(spec, priority)
            except NobodyListens:
                await self._make(spec)
                raw = await self._ask(spec, priority)
            return None if raw is None else WireDelivery(self._wire, raw)

    async def close(self) -> None:
        """Stop listening and hand back what nobody took."""
        if self._listening is not None:
            await self._listening.close()
        while self._ready:
            await self._wire.send(self._ready.popleft().reply, b"-NAK")

    async def _ask(self, spec: ConsumerSpec, priority: int) -> Raw | None:
        if self._ready:
            return self._ready.popleft()
        self._asked += 1
        self._statuses.clear()
        token = f"{self._prefix}.{self._asked}"
        await send_pull(self._wire, spec, {"batch": 1, "no_wait": True}, token, priority=priority)
        try:
            async with asyncio.timeout(_ANSWER_S):
                while not self._ready:
                    if self._none(token):
                        return None
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unanswered(f"a pull on {spec.durable} was not answered within {_ANSWER_S:g} s") from None
        return self._ready.popleft()

    def _none(self, token: str) -> bool:
        """Whether the server said that there is nothing. Raises NobodyListens without the consumer, else Unavailable."""
        while self._statuses:
            status = self._statuses.popleft()
            if status.subject != token:
                continue
            if status.status in ("404", "408"):
                return True
            text = f"{status.status} {status.headers.get('Description', '')}".rstrip()
            raise (NobodyListens if status.status in _GONE else Unavailable)(text)
        return False

    def _receive(self, raw: Raw) -> None:
        (self._statuses if raw.status else self._ready).append(raw)
        self._changed.set()
