"""The bounded buffer behind every subscription: a slow reader loses messages and can see that it did (FR-104)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from shared.errors import Unavailable
from shared.transport.base import Received

MAX_MESSAGES: Final = 4096
MAX_BYTES: Final = 16 << 20


class Buffer:
    """A `Subscription`. Filled by `offer` from the event loop; not thread-safe. Any number of readers."""

    def __init__(
        self,
        on_close: Callable[[], Awaitable[None]],
        *,
        max_messages: int = MAX_MESSAGES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._on_close = on_close
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[Received] = deque()
        self._bytes = 0
        self._dropped = 0
        self._closed = False
        self._changed = asyncio.Event()

    def offer(self, message: Received) -> bool:
        """Add a message. False when it was dropped for lack of room, or after `close`."""
        if self._closed:
            return False
        if len(self._messages) >= self._max_messages or self._bytes + len(message.data) > self._max_bytes:
            self.lost(1)
            return False
        self._messages.append(message)
        self._bytes += len(message.data)
        self._changed.set()
        return True

    def lost(self, count: int) -> None:
        """Note messages that were lost before they came here."""
        self._dropped += count

    async def next(self, timeout: float) -> Received | None:
        """The next message, or None after `timeout` seconds. Raises Unavailable once closed."""
        if not self._messages and not self._closed:
            try:
                async with asyncio.timeout(timeout):
                    await self._wait()
            except TimeoutError:
                return None
        if self._closed:
            raise Unavailable("the subscription is closed")
        return self._take()

    async def __aiter__(self) -> AsyncIterator[Received]:
        while True:
            await self._wait()
            if self._closed:
                return
            yield self._take()

    @property
    def dropped(self) -> int:
        return self._dropped

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._messages.clear()
        self._changed.set()
        await self._on_close()

    async def _wait(self) -> None:
        """Until there is a message, or the buffer is closed."""
        while not self._messages and not self._closed:
            self._changed.clear()
            await self._changed.wait()

    def _take(self) -> Received:
        message = self._messages.popleft()
        self._bytes -= len(message.data)
        return message
