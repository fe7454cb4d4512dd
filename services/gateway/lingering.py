"""Requests with an Idempotency-Key whose caller left: they run on for a while, for the caller may come back.

    caller leaves ──> `linger_s` ──> ended, or read by somebody (here or at another gateway) ──> left alone
                                └──> cancelled

Whoever reads such a stream answers on `rdr.<request>`, so a gateway needs no memory of readers. If the gateway itself goes,
nobody cancels: the request runs to its end, which is bounded by its deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from services.gateway.slots import Slots
from shared.errors import BurstlineError
from shared.lifecycle import cancel_and_wait
from shared.protocol import codec, subjects
from shared.protocol.messages import Identity, Terminal
from shared.transport.base import Received, Subscription, Transport

_log = logging.getLogger(__name__)


class Lingering:
    """Owns a task for each request that nobody reads; a tenant may have as many as it may run."""

    def __init__(
        self,
        transport: Transport,
        cancel: Callable[[str], Awaitable[None]],
        *,
        linger_s: float,
        answer_s: float,
        limit: int,
    ) -> None:
        """`cancel` ends a request whose caller did not come back. `answer_s`: a reader's time to say that it is there."""
        self._transport: Final = transport
        self._cancel: Final = cancel
        self._linger_s: Final = linger_s
        self._answer_s: Final = answer_s
        self._slots: Final = Slots(limit)
        self._tasks: Final[set[asyncio.Task[None]]] = set()

    def begin(self, identity: Identity, request_id: str) -> None:
        """The reader of a request left."""
        task = asyncio.create_task(self._linger(identity, request_id), name=f"linger {request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _linger(self, identity: Identity, request_id: str) -> None:
        try:
            with self._slots.taken(identity):
                await asyncio.sleep(self._linger_s)
        except BurstlineError:
            _log.info("request %s is cancelled at once: too many wait for their callers", request_id)
        try:
            if await has_ended(self._transport, request_id) or await self._read(request_id):
                return
        except BurstlineError as error:
            _log.warning("whether request %s has ended cannot be read: %s", request_id, error.code)
        await self._cancel(request_id)

    async def _read(self, request_id: str) -> bool:
        try:
            await self._transport.request(subjects.readers(request_id), b"", timeout=self._answer_s)
        except BurstlineError:
            return False
        return True

    async def close(self) -> None:
        """Stop waiting. What lingers runs on: its caller may go to another gateway."""
        await cancel_and_wait(list(self._tasks))


async def announce(transport: Transport, request_id: str) -> Subscription:
    """Say of a stream that it is read, until the subscription is closed. Raises Unavailable."""

    async def here(_: Received) -> bytes:
        return b""

    return await transport.serve(subjects.readers(request_id), subjects.READERS_QUEUE, here, concurrency=1)


async def has_ended(transport: Transport, request_id: str) -> bool:
    """Whether the journal of a request has its terminal. Raises Unavailable, and ProtocolError for what cannot be read."""
    last = await transport.last(subjects.JOURNAL.name, subjects.tokens(request_id))
    return last is not None and isinstance(codec.decode(last.data), Terminal)
