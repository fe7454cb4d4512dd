"""Drives the pure token stream (`shared.protocol.stream`): hears `tok.<request>` live, and asks the journal when told to.

A queue that is away for a while is waited out: what had to be read is read when it is back, until the reader's patience
ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final

from services.gateway.storing import StorageWatch
from shared.clock import Clock
from shared.errors import BurstlineError, ProtocolError, Unavailable
from shared.outage import Outage
from shared.protocol import codec, stream, subjects
from shared.protocol.messages import (
    Frame,
    GenerateRequest,
    PromptScores,
    Started,
    StreamMessage,
    Terminal,
)
from shared.protocol.stream import Action, Alarm, Claimed, Emit, End, ReadJournal, ReadLast, Scored
from shared.protocol.subjects import JOURNAL
from shared.transport.base import Received, Subscription, Transport

_log = logging.getLogger(__name__)
_outage: Final = Outage(_log, "reads of journals")  # all readers have one server
_PAGE: Final = 256
_RETRY_S: Final = 0.25

News = Claimed | Scored | Emit | End


class TokenReader:
    """One reader of one request's stream. Make one with `open`; `close` gives the subscription back."""

    def __init__(
        self,
        transport: Transport,
        request: GenerateRequest,
        subscription: Subscription,
        clock: Clock,
        *,
        quiet_s: float,
        stuck_s: float,
    ) -> None:
        """`quiet_s`: without a live message for so long the journal is looked at; `stuck_s`: see `StorageWatch`."""
        self._transport: Final = transport
        self._subject: Final = subjects.tokens(request.request_id)
        self._subscription: Final = subscription
        self._clock: Final = clock
        self._quiet_ns: Final = int(quiet_s * 1e9)
        self._quiet_since_ns = clock.monotonic_ns()
        self._storing: Final = StorageWatch(clock, quiet_s=quiet_s, limit_s=stuck_s)
        self._state = stream.begin(
            request.request_id,
            choices=request.choices,
            max_tokens=request.max_tokens,
            to_score=request.to_score,
        )
        self._news: deque[News] = deque()
        self._reads: deque[ReadJournal | ReadLast] = deque()
        self._dropped = 0
        self._fault: BurstlineError | None = None

    @classmethod
    async def open(
        cls,
        transport: Transport,
        request: GenerateRequest,
        clock: Clock,
        *,
        quiet_s: float,
        stuck_s: float,
        running: bool = False,
    ) -> TokenReader:
        """Subscribe; when this returns no later frame is missed. `running`: the journal is read first. Raises Unavailable."""
        subscription = await transport.subscribe(subjects.tokens(request.request_id), settled=False)
        reader = cls(transport, request, subscription, clock, quiet_s=quiet_s, stuck_s=stuck_s)
        if running:
            reader._take(stream.ask(reader._state))
        return reader

    async def next(self, timeout_s: float) -> News | None:
        """The next news, or None after `timeout_s`.

        Raises:
            Unavailable: the connection is closed.
            ProtocolError: the stream contradicts itself; nothing more of it is relayed.
            Overloaded: what the worker sends cannot be stored.
            BurstlineError: what `abort` was given.
        """
        until = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        while not self._news:
            if self._fault is not None:
                raise self._fault
            left = (until - self._clock.monotonic_ns()) / 1e9
            if left <= 0:
                return None
            if self._reads:
                await self._read(left)
            else:
                await self._listen(left)
        return self._news.popleft()

    async def _listen(self, left_s: float) -> None:
        """One live message, or a look at the journal after a quiet time, however often its caller looks up, or a loss."""
        quiet_until = self._quiet_since_ns + self._quiet_ns
        until_quiet_s = (quiet_until - self._clock.monotonic_ns()) / 1e9
        try:
            message = await self._subscription.next(max(0.0, min(left_s, until_quiet_s)))
        except Unavailable:
            if self._fault is None:
                raise
            return  # closed by `abort`
        decoded = None if message is None else _decode(message)
        if message is not None and decoded is not None:
            self._take(stream.step(self._state, decoded))
            if self._storing.heard(message.data, claim=isinstance(decoded, Started)):
                self._take(stream.ask(self._state))
        lost, self._dropped = self._subscription.dropped > self._dropped, self._subscription.dropped
        now = self._clock.monotonic_ns()
        quiet = message is None and now >= quiet_until
        if quiet or message is not None:
            self._quiet_since_ns = now
        if lost or quiet:
            self._take(stream.ask(self._state))

    async def _read(self, left_s: float) -> None:
        """Obey the first read that is due; kept for later if the queue is away."""
        action = self._reads[0]
        await asyncio.sleep(min(action.delay_s, left_s))
        try:
            match action:
                case ReadJournal(after=after):
                    await self._read_journal(after)
                case ReadLast():
                    await self._read_last()
            self._storing.check()
        except Unavailable as error:
            _outage.failed(error.code)
            await asyncio.sleep(min(_RETRY_S, left_s))
            return
        _outage.worked()
        self._reads.popleft()

    async def _read_journal(self, after: int) -> None:
        while stored := await self._transport.read(JOURNAL.name, self._subject, after=after, limit=_PAGE):
            for message in stored:
                after = message.sequence
                self._storing.found(after, message.data)
                decoded = _decode(message)
                if decoded is not None:
                    self._take(stream.step(self._state, decoded, message.sequence))
            if len(stored) < _PAGE:
                break
        self._take(stream.read_done(self._state))

    async def journalled(self) -> bool:
        """Whether the journal holds anything of the request; what was heard live may have been refused. Raises Unavailable."""
        return self._storing.journalled or await self._last() is not None

    async def _last(self) -> Received | None:
        last = await self._transport.last(JOURNAL.name, self._subject)
        if last is not None:
            self._storing.found(last.sequence, last.data)
        return last

    async def _read_last(self) -> None:
        last = await self._last()
        decoded = None if last is None else _decode(last)
        sequence = 0 if last is None else last.sequence
        self._take(stream.confirm(self._state, decoded, sequence))

    def _take(self, step: tuple[stream.StreamState, tuple[Action, ...]]) -> None:
        self._state, actions = step
        for action in actions:
            match action:
                case Claimed() | Scored() | Emit() | End():
                    self._news.append(action)
                case ReadJournal() | ReadLast():
                    self._reads.append(action)
                case Alarm(reason=reason):
                    _log.error("%s: %s", self._subject, reason)
                    self._fault = ProtocolError(f"the token stream is broken: {reason}")
                    return  # what comes after may not fit what was relayed

    async def abort(self, error: BurstlineError) -> None:
        """Let the one who waits in `next` have `error`, now."""
        self._fault = error
        await self._subscription.close()

    async def close(self) -> None:
        """Give the subscription back. Idempotent."""
        await self._subscription.close()


def _decode(message: Received) -> StreamMessage | None:
    """A message of the stream; anything else is dropped with a line in the log."""
    try:
        decoded = codec.decode(message.data)
    except ProtocolError as error:
        _log.error("%s: %s", message.subject, error.message)
        return None
    if isinstance(decoded, Started | PromptScores | Frame | Terminal):
        return decoded
    _log.error("%s: a %s does not belong here", message.subject, type(decoded).__name__)
    return None


__all__ = ["Claimed", "Emit", "End", "News", "Scored", "TokenReader"]
