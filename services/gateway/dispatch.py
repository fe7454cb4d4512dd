"""Requests on the queue: enqueue one, read its stream, send its cancellation.

The subscription to `tok.<request>` stands before the request is appended, so no frame is missed. A request whose reader
is gone is cancelled by a journalled message that a worker also sees live; the message is sent by a task of the
dispatcher, since the reader's own task may be dying. One with an Idempotency-Key runs on for a while (`lingering`), and
may be read by several, at any gateway. What becomes of a request until its end is told in `generation`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from services.gateway.config import GatewaySettings
from services.gateway.generation import CancelReason, Generation, Then, closing
from services.gateway.keys import Owner
from services.gateway.lingering import Lingering, announce, has_ended
from services.gateway.orphans import OrphanWatch
from services.gateway.queues import Queues
from services.gateway.reader import TokenReader
from services.gateway.routing import Route
from services.gateway.workers import Fleet
from shared.clock import Clock
from shared.errors import BurstlineError, Overloaded, Unavailable
from shared.protocol import codec, subjects
from shared.protocol.messages import CancelRequest, GenerateRequest
from shared.storing import StoreHealth
from shared.telemetry import Parent, Telemetry
from shared.transport import bodies
from shared.transport.base import Transport

_log = logging.getLogger(__name__)


class Dispatcher:
    """Opens generations, and owns the tasks that outlive a reader."""

    def __init__(
        self,
        transport: Transport,
        telemetry: Telemetry,
        settings: GatewaySettings,
        clock: Clock,
        fleet: Fleet,
        queues: Queues,
        storing: StoreHealth,
    ) -> None:
        self.settings: Final = settings
        self.clock: Final = clock
        self.fleet: Final = fleet
        self._queues: Final = queues
        self._storing: Final = storing
        self._transport: Final = transport
        self._telemetry: Final = telemetry
        self._sending: Final[set[asyncio.Task[None]]] = set()
        self._readers: Final[set[TokenReader]] = set()
        self.lingering: Final = Lingering(
            transport,
            self._not_back,
            linger_s=settings.linger_s,
            answer_s=settings.broker_timeout_s,
            limit=settings.max_in_flight,
        )

    @asynccontextmanager
    async def open(
        self, request: GenerateRequest, route: Route, parent: Parent, *, keyed: Owner | None = None
    ) -> AsyncIterator[Generation]:
        """Enqueue `request` and yield its generation. Leaving the block early cancels it, unless it is `keyed`.

        `parent` is the span that the worker's spans hang on.

        Raises:
            Unavailable, Overloaded, PayloadTooLarge: it could not be enqueued.
        """
        headers = self.headers(request, parent)
        async with self._reading(request, keyed, running=False) as reader:
            generation = Generation(self, request, reader, keyed=keyed)
            with closing(generation):
                with self._telemetry.soon("enqueue", parent, {"messaging.destination.name": route.subject}):
                    await self.enqueue(request, route.subject, headers)
                yield generation

    @asynccontextmanager
    async def attach(self, request: GenerateRequest, keyed: Owner) -> AsyncIterator[Generation]:
        """Read a request that runs or has ended, from its beginning. `request` needs no prompt.

        Raises:
            Unavailable: the queue is away.
        """
        async with self._reading(request, keyed, running=True) as reader:
            over = await has_ended(self._transport, request.request_id)
            generation = Generation(self, request, reader, keyed=keyed, over=over)
            with closing(generation):
                yield generation

    @asynccontextmanager
    async def _reading(
        self, request: GenerateRequest, keyed: Owner | None, *, running: bool
    ) -> AsyncIterator[TokenReader]:
        reader = await TokenReader.open(
            self._transport,
            request,
            self.clock,
            quiet_s=self.settings.quiet_s,
            stuck_s=self.settings.journal_stuck_s,
            running=running,
        )
        self._readers.add(reader)
        try:
            if keyed is None:
                yield reader
            else:
                present = await announce(self._transport, request.request_id)
                try:
                    yield reader
                finally:
                    await present.close()
        finally:
            self._readers.discard(reader)
            await reader.close()

    async def enqueue(self, request: GenerateRequest, subject: str, headers: dict[str, str]) -> None:
        """Append a request, once: the server drops a repetition by its id. Raises what `open` does."""
        try:
            await self._append(request, subject, headers)
        except (Unavailable, Overloaded) as error:
            if await self._transport.ready():
                self._storing.gave_up(error.code)
            raise
        self._storing.stored()
        self._queues.added(subject)

    async def _append(self, request: GenerateRequest, subject: str, headers: dict[str, str]) -> None:
        data = await bodies.pack(
            self._transport,
            request,
            headers,
            most_bytes=self.settings.max_prompt_bytes,
            timeout=self.settings.broker_timeout_s,
        )
        await self._transport.append(
            subject,
            data,
            message_id=request.request_id,
            headers=headers,
            timeout=self.settings.broker_timeout_s,
        )

    def orphan_watch(self, request: GenerateRequest) -> OrphanWatch:
        """Tells when nobody is left who could answer it: a worker of its fingerprint, or of its model, which takes over."""
        return OrphanWatch(
            request.namespace.fingerprint,
            staffed=lambda fingerprint: (
                self.fleet.staffed(fingerprint) or self.fleet.has_heirs(request.model, fingerprint)
            ),
            hearing=self._transport.ready,
            clock=self.clock,
            grace_s=self.settings.orphan_grace_s,
        )

    def headers(self, request: GenerateRequest, parent: Parent) -> dict[str, str]:
        """What travels beside a request: the trace, and what an operator may want to see without decoding."""
        return {
            **self._telemetry.headers(parent),
            subjects.TENANT: request.tenant,
            subjects.DEADLINE: str(request.deadline_ns),
        }

    async def abort(self) -> None:
        """End every reader with an error; the process cannot wait any longer."""
        for reader in list(self._readers):
            await reader.abort(Unavailable("this gateway is shutting down", code="shutting_down"))

    def send_cancel(
        self,
        request_id: str,
        reason: CancelReason,
        choice: int | None,
        offset: int | None,
        *,
        then: Then | None = None,
    ) -> None:
        """Journal a cancellation in the background, and do `then` once it is stored."""
        message = CancelRequest(request_id=request_id, reason=reason, choice=choice, offset=offset)
        task = asyncio.create_task(self._send_cancel(message, then), name=f"cancel {request_id}")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _not_back(self, request_id: str) -> None:
        reason: CancelReason = "client_disconnected"
        await self._send_cancel(CancelRequest(request_id=request_id, reason=reason, choice=None, offset=None))

    async def _send_cancel(self, message: CancelRequest, then: Then | None = None) -> None:
        try:
            await self._transport.append(
                subjects.cancel(message.request_id),
                codec.encode(message),
                timeout=self.settings.broker_timeout_s,
            )
        except BurstlineError as error:
            _log.warning("request %s could not be cancelled: %s", message.request_id, error.code)
            return
        if then is not None:
            await then()

    async def close(self) -> None:
        """Wait for the cancellations that are under way; no more for callers who may come back."""
        await self.lingering.close()
        await asyncio.gather(*self._sending, return_exceptions=True)
