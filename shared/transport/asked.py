"""Questions to a server that wait for their answers, each with its own time limit and without a task."""

from __future__ import annotations

import asyncio
from typing import Final

from shared.transport.wire import NobodyListens, Raw, Unanswered

_NO_RESPONDERS: Final = "503"


class Asked:
    """A `Question` among those that wait, by the inbox of its answer."""

    __slots__ = ("_answer", "_inbox", "_late", "_subject", "_waiting")

    def __init__(
        self, waiting: dict[str, asyncio.Future[Raw | None]], inbox: str, subject: str, timeout: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self._waiting, self._inbox, self._subject = waiting, inbox, subject
        self._answer: asyncio.Future[Raw | None] = loop.create_future()
        self._late = loop.call_later(timeout, self._give_up)
        waiting[inbox] = self._answer

    async def answer(self) -> Raw:
        try:
            raw = await self._answer
        finally:
            self.drop()
        if raw is None:
            raise Unanswered(f"{self._subject}: no answer in time")
        if raw.status == _NO_RESPONDERS and not raw.data:
            raise NobodyListens(f"{self._subject}: nobody listens")
        return raw

    def drop(self) -> None:
        self._late.cancel()
        self._waiting.pop(self._inbox, None)

    def _give_up(self) -> None:
        self.drop()
        if not self._answer.done():
            self._answer.set_result(None)
