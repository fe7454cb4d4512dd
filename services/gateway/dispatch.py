"""One request on the queue: enqueue it, read its stream, and cancel it on every way out that is not its end.

The subscription to `tok.<request>` stands before the request is appended, so no frame is missed. A request whose reader
is gone is cancelled by a journalled message that a worker also sees live; the message is sent by a task of the
dispatcher, since the reader's own task may be dying. One with an Idempotency-Key runs on for a while (`lingering`), and
may be read by several, at any gateway.

A request on one worker's own subject is seen by nobody else. If that worker falls silent, the request is put on the
shared subject as well: another worker claims it as the next attempt, and should the first one live after all, the
journal's fence lets only one of them write (C2), and it leaves its own copy to the other. If no worker of the
fingerprint is left, the request ends (`orphans`) and its cancellation keeps it from running later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final, Literal

from services.gateway.config import GatewaySettings
from services.gateway.keys import Owner
from services.gateway.lingering import Lingering, announce, has_ended
from services.gateway.orphans import OrphanWatch
from services.gateway.reader import Claimed, End, News, TokenReader
from services.gateway.routing import Route
from services.gateway.workers import Fleet
from shared.clock import Clock
from shared.errors import BurstlineError, DeadlineExceeded, Overloaded, Unavailable
from shared.protocol import codec, subjects
from shared.protocol.messages import CancelRequest, GenerateRequest, Terminal
from shared.telemetry import Parent, Telemetry
from shared.transport.base import Transport

_log = logging.getLogger(__name__)

_WATCH_S: Final = 1.0
"""How often a request's workers are looked at while nothing comes."""

Then = Callable[[], Awaitable[None]]
CancelReason = Literal["client_disconnected", "stop_string", "deadline", "operator"]


class Generation:
    """A request that is on the queue."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: GenerateRequest,
        reader: TokenReader,
        *,
        worker: str | None = None,
        headers: dict[str, str] | None = None,
        keyed: Owner | None = None,
        over: bool = False,
    ) -> None:
        """`worker`: the only one who can see it. `keyed`: whose it is, if its caller can come back to it. `over`: its
        journal has its end already."""
        self.request: Final = request
        self.headers: Final = headers or {}
        self._worker = worker
        self._keyed: Final = keyed
        self._dispatcher: Final = dispatcher
        self._reader: Final = reader
        self._settings: Final = dispatcher.settings
        self._clock: Final = dispatcher.clock
        self._claimed = False  # as heard live: the journal may have refused it
        self._started = False
        self._orphans: Final = dispatcher.orphan_watch(request)
        self.ended = False
        self.cancelled = over
        self._over: Final = over

    async def messages(self) -> AsyncGenerator[News]:
        """The stream, each token once and in order; ends after the terminal.

        Raises:
            Overloaded: no worker took it within the queue deadline (FR-108).
            DeadlineExceeded: its own deadline passed.
            Overloaded: what its worker sends cannot be stored.
            Unavailable: the queue is away, or the workers are gone for good.
        """
        queue_until = self._clock.monotonic_ns() + int(self._settings.queue_deadline_s * 1e9)
        while not self.ended:
            news = await self._reader.next(self._patience(queue_until))
            if news is not None:
                self._claimed = True
                self._started = self._started or not isinstance(news, Claimed)
                self.ended = isinstance(news, End)
                yield news
            else:
                await self._check_deadlines(queue_until)
                await self._watch()

    async def terminal(self, within_s: float) -> Terminal | None:
        """Only the terminal, if it comes in time; for a reader that has all it wants, so a fault is no news."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    news = await self._reader.next(within_s)
                    if isinstance(news, End):
                        self.ended = True
                        return news.terminal
        except (TimeoutError, BurstlineError):
            return None

    def _patience(self, queue_until: int) -> float:
        """Seconds until the next deadline."""
        left = [(self.request.deadline_ns - self._clock.wall_ns()) / 1e9]
        if not self._claimed:
            left.append((queue_until - self._clock.monotonic_ns()) / 1e9)
        return max(0.0, min(*left, _WATCH_S))

    async def _watch(self) -> None:
        """The worker that alone can see the request is silent: let the others have it, if there are any.

        Raises:
            Unavailable: there are none, and none came back.
        """
        try:
            await self._orphans.check()
        except Unavailable:
            self.cancel("operator")
            raise
        if self._worker is None or self._dispatcher.fleet.alive(self._worker):
            return
        try:
            request = self.request
            subject = subjects.request_shared(request.namespace.fingerprint, request.priority, request.tenant)
            await self._dispatcher.enqueue(request, subject, f"{request.request_id}.shared", self.headers)
        except (Unavailable, Overloaded) as error:
            _log.warning("request %s cannot be handed on now: %s", self.request.request_id, error.code)
            return
        _log.warning(
            "request %s is handed on: its worker %s is silent", self.request.request_id, self._worker
        )
        self._worker = None

    async def _check_deadlines(self, queue_until: int) -> None:
        if self._clock.wall_ns() >= self.request.deadline_ns:
            self.cancel("deadline")
            raise DeadlineExceeded("the request's deadline passed")
        if self._clock.monotonic_ns() >= queue_until and not await self._begun():
            self.cancel("deadline", then=None if self._keyed is None else self._keyed.forget)
            raise Overloaded(
                f"no worker took the request within {self._settings.queue_deadline_s:g} s", retry_after_s=5
            )

    async def _begun(self) -> bool:
        """Whether a worker has it: a claim counts once the journal holds it. While that cannot be read, it is believed."""
        if self._claimed and not self._started:
            try:
                self._started = await self._reader.journalled()
            except Unavailable:
                return True
        return self._started

    def stop(self, choice: int | None, offset: int) -> None:
        """A stop string is complete: `offset` tokens of the choice count."""
        if self._over:
            return
        self._dispatcher.send_cancel(self.request.request_id, "stop_string", choice, offset)
        self.cancelled = self.cancelled or choice is None

    def leave(self) -> None:
        """Its reader is gone: cancelled, or with a key kept for a while in case the reader comes back."""
        if self._keyed is None:
            self.cancel("client_disconnected")
        elif not self.ended and not self.cancelled:
            self._dispatcher.lingering.begin(self._keyed.identity, self.request.request_id)

    def fail(self, error: BaseException) -> None:
        """It cannot be told to its end here. With a key another gateway can go on, if it is this one that ends."""
        goes_on = isinstance(error, BurstlineError) and error.code == "shutting_down"
        if self._keyed is None or not goes_on:
            self.cancel("operator")

    def cancel(self, reason: CancelReason, *, then: Then | None = None) -> None:
        """End all of it, and `then` that once it is sure to end. Idempotent; nothing to do after the terminal."""
        if not self.ended and not self.cancelled:
            self.cancelled = True
            self._dispatcher.send_cancel(self.request.request_id, reason, None, None, then=then)


class Dispatcher:
    """Opens generations, and owns the tasks that outlive a reader."""

    def __init__(
        self,
        transport: Transport,
        telemetry: Telemetry,
        settings: GatewaySettings,
        clock: Clock,
        fleet: Fleet,
    ) -> None:
        self.settings: Final = settings
        self.clock: Final = clock
        self.fleet: Final = fleet
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
            generation = Generation(self, request, reader, worker=route.worker, headers=headers, keyed=keyed)
            with _closing(generation):
                with self._telemetry.span("enqueue", parent, {"messaging.destination.name": route.subject}):
                    await self.enqueue(request, route.subject, request.request_id, headers)
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
            with _closing(generation):
                yield generation

    @asynccontextmanager
    async def _reading(
        self, request: GenerateRequest, keyed: Owner | None, *, running: bool
    ) -> AsyncIterator[TokenReader]:
        async with AsyncExitStack() as stack:
            reader = await TokenReader.open(
                self._transport,
                request,
                self.clock,
                quiet_s=self.settings.quiet_s,
                stuck_s=self.settings.journal_stuck_s,
                running=running,
            )
            stack.push_async_callback(reader.close)
            if keyed is not None:
                present = await announce(self._transport, request.request_id)
                stack.push_async_callback(present.close)
            self._readers.add(reader)
            stack.callback(self._readers.discard, reader)
            yield reader

    async def enqueue(
        self, request: GenerateRequest, subject: str, message_id: str, headers: dict[str, str]
    ) -> None:
        """Append a request. `message_id` lets the server drop a repetition."""
        await self._transport.append(
            subject,
            codec.encode(request),
            message_id=message_id,
            headers=headers,
            timeout=self.settings.broker_timeout_s,
        )

    def orphan_watch(self, request: GenerateRequest) -> OrphanWatch:
        """Tells when nobody is left who could answer it."""
        return OrphanWatch(
            request.namespace.fingerprint,
            staffed=self.fleet.staffed,
            hearing=self._transport.ready,
            clock=self.clock,
            grace_s=self.settings.orphan_grace_s,
        )

    def headers(self, request: GenerateRequest, parent: Parent) -> dict[str, str]:
        """What travels beside a request: the trace, and what an operator may want to see without decoding."""
        return {
            **self._telemetry.headers(parent),
            "burstline-tenant": request.tenant,
            "burstline-deadline-ns": str(request.deadline_ns),
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


@contextmanager
def _closing(generation: Generation) -> Iterator[None]:
    """Whichever way a block is left that is not the stream's end, the generation is told."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        generation.leave()
        raise
    except BaseException as error:
        generation.fail(error)
        raise
