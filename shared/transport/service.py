"""The answering side of request/reply: bounded concurrency, bounded waiting, and an answer even when a handler fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from shared.errors import Unavailable
from shared.lifecycle import cancel_and_wait
from shared.transport.base import Handler, Received

_log = logging.getLogger(__name__)

WAITING_PER_WORKER: Final = 64
CLOSE_S: Final = 5.0

Reply = Callable[[bytes | None], Awaitable[None]]
"""Sends the answer; None says that the handler failed."""


class Service:
    """A `Subscription` whose messages go to a handler. `offer` never blocks: beyond the bound a request is refused."""

    def __init__(self, handler: Handler, concurrency: int, on_close: Callable[[], Awaitable[None]]) -> None:
        self._handler = handler
        self._on_close = on_close
        self._slots = asyncio.Semaphore(concurrency)
        self._bound = concurrency * (1 + WAITING_PER_WORKER)
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped = 0
        self._ended = asyncio.Event()

    def offer(self, message: Received, reply: Reply) -> bool:
        """Take a request. False when it was refused for lack of room, or after `close`."""
        if self._ended.is_set() or len(self._tasks) >= self._bound:
            self.lost(1)
            return False
        task = asyncio.create_task(self._answer(message, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def lost(self, count: int) -> None:
        """Note requests that were lost before they came here."""
        self._dropped += count

    async def _answer(self, message: Received, reply: Reply) -> None:
        async with self._slots:
            try:
                result: bytes | None = await self._handler(message)
            except Exception:  # noqa: BLE001 - whatever a handler raises, the caller is told and the service goes on
                _log.exception("the handler of %s failed", message.subject)
                result = None
            try:
                await reply(result)
            except Unavailable:
                _log.warning("an answer on %s could not be sent", message.subject)

    def __aiter__(self) -> AsyncIterator[Received]:
        return self

    async def __anext__(self) -> Received:
        """Requests go to the handler: iteration only waits for the end."""
        await self._ended.wait()
        raise StopAsyncIteration

    async def next(self, timeout: float) -> Received | None:
        """None at the end or after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._ended.wait()
        except TimeoutError:
            pass
        return None

    @property
    def dropped(self) -> int:
        return self._dropped

    async def close(self) -> None:
        """Take no more; what runs gets `CLOSE_S` seconds to end, then it is cancelled."""
        if self._ended.is_set():
            return
        self._ended.set()
        await self._on_close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_S)
            await cancel_and_wait(late)
