"""One request that is on the queue: its news, its deadlines, and its cancellation on every way out that is not its end.

Whichever subject it is on, any worker of its fingerprint comes to it in the end: what one leaves, the others pull. If none
is left, the request ends (`orphans`) and its cancellation keeps it from running later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, Protocol

from services.gateway.config import GatewaySettings
from services.gateway.keys import Owner
from services.gateway.lingering import Lingering
from services.gateway.orphans import OrphanWatch
from services.gateway.reader import Claimed, End, News, TokenReader
from shared.clock import Clock
from shared.errors import BurstlineError, DeadlineExceeded, Overloaded, Unavailable
from shared.protocol.messages import GenerateRequest, Terminal

_WATCH_S: Final = 1.0
"""How often a request's workers are looked at while nothing comes."""

Then = Callable[[], Awaitable[None]]
CancelReason = Literal["client_disconnected", "stop_string", "deadline", "operator"]


class Carrier(Protocol):
    """What a generation asks of the dispatcher that opened it."""

    @property
    def settings(self) -> GatewaySettings: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def lingering(self) -> Lingering: ...

    def orphan_watch(self, request: GenerateRequest) -> OrphanWatch: ...

    def send_cancel(
        self,
        request_id: str,
        reason: CancelReason,
        choice: int | None,
        offset: int | None,
        *,
        then: Then | None = None,
    ) -> None: ...


class Generation:
    """A request that is on the queue."""

    def __init__(
        self,
        carrier: Carrier,
        request: GenerateRequest,
        reader: TokenReader,
        *,
        keyed: Owner | None = None,
        over: bool = False,
    ) -> None:
        """`keyed`: whose it is, if its caller can come back to it. `over`: its journal has its end already."""
        self.request: Final = request
        self._keyed: Final = keyed
        self._carrier: Final = carrier
        self._reader: Final = reader
        self._settings: Final = carrier.settings
        self._clock: Final = carrier.clock
        self._claimed = False  # as heard live: the journal may have refused it
        self._started = False
        self._orphans: Final = carrier.orphan_watch(request)
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
        """Are there workers that can answer it?

        Raises:
            Unavailable: there are none, and none came back.
        """
        try:
            await self._orphans.check()
        except Unavailable:
            self.cancel("operator")
            raise

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
        self._carrier.send_cancel(self.request.request_id, "stop_string", choice, offset)
        self.cancelled = self.cancelled or choice is None

    def leave(self) -> None:
        """Its reader is gone: cancelled, or with a key kept for a while in case the reader comes back."""
        if self._keyed is None:
            self.cancel("client_disconnected")
        elif not self.ended and not self.cancelled:
            self._carrier.lingering.begin(self._keyed.identity, self.request.request_id)

    def fail(self, error: BaseException) -> None:
        """It cannot be told to its end here. With a key another gateway can go on, if it is this one that ends."""
        goes_on = isinstance(error, BurstlineError) and error.code == "shutting_down"
        if self._keyed is None or not goes_on:
            self.cancel("operator")

    def cancel(self, reason: CancelReason, *, then: Then | None = None) -> None:
        """End all of it, and `then` that once it is sure to end. Idempotent; nothing to do after the terminal."""
        if not self.ended and not self.cancelled:
            self.cancelled = True
            self._carrier.send_cancel(self.request.request_id, reason, None, None, then=then)


@contextmanager
def closing(generation: Generation) -> Iterator[None]:
    """Whichever way a block is left that is not the stream's end, the generation is told."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        generation.leave()
        raise
    except BaseException as error:
        generation.fail(error)
        raise
