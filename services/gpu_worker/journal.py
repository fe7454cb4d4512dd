"""The journal of one request (`tok.<request>`): what earlier attempts left, and the fenced writer of this one.

Reading folds the stored messages into a `JournalState`; the fold is pure. Writing goes through `Journal.append`, one
publish in flight, each naming the sequence that it expects to be the last: whoever lost its claim is refused
(`FencedOut`) and publishes nothing more (C2).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shared.clock import Clock
from shared.errors import FencedOut, Overloaded, ProtocolError, Unavailable
from shared.protocol import codec, subjects
from shared.protocol.messages import (
    CancelRequest,
    Frame,
    PromptScores,
    Started,
    StreamMessage,
    Terminal,
    unpack_tokens,
)
from shared.transport.base import Looking, Received, Transport

log = logging.getLogger(__name__)

_PAGE: Final = 512
_NONE: Final[Mapping[str, str]] = {}
_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class JournalState:
    """What the journal holds. `tokens` are the completion tokens of each choice, in order, without gaps."""

    sequence: int  # of the last message; 0 = the journal is empty
    attempt: int  # the newest claim; 0 = none
    starts: int
    vain: int  # claims up to the newest one, of which none but perhaps the first got any further
    fingerprint: str | None  # of the first claim: the request is bound to it
    mixed: bool  # a claim of another fingerprint followed: no numerics alone made these tokens
    worker_id: str | None  # of the newest claim
    tokens: tuple[tuple[int, ...], ...]
    scores: int  # prompt tokens whose log probabilities it holds, from the second one on
    terminal: Terminal | None

    @property
    def offsets(self) -> tuple[int, ...]:
        """Completion tokens of each choice."""
        return tuple(len(choice) for choice in self.tokens)


def empty(choices: int) -> JournalState:
    """The state of a journal that nobody wrote."""
    return JournalState(
        sequence=0,
        attempt=0,
        starts=0,
        vain=0,
        fingerprint=None,
        mixed=False,
        worker_id=None,
        tokens=((),) * choices,
        scores=0,
        terminal=None,
    )


def fold(state: JournalState, sequence: int, message: StreamMessage) -> JournalState:
    """The state after one more stored message.

    The fence lets only the newest claim write, so every stored frame counts; an overlap must agree.

    Raises:
        ProtocolError: a frame of an unknown choice, one that contradicts what is stored, or a gap.
    """
    state = replace(state, sequence=sequence)
    match message:
        case Started():
            return replace(
                state,
                attempt=message.attempt,
                starts=state.starts + 1,
                vain=state.vain + 1,
                fingerprint=state.fingerprint or message.fingerprint,
                mixed=state.mixed or state.fingerprint not in (None, message.fingerprint),
                worker_id=message.worker_id,
            )
        case PromptScores():
            if message.offset > state.scores:
                raise ProtocolError(f"scores at offset {message.offset} follow {state.scores}")
            scores = max(state.scores, message.offset + len(message.entries))
            return replace(state, scores=scores, vain=min(1, state.vain))
        case Frame(tokens=b""):
            return replace(state, vain=max(0, state.vain - 1))  # handed back: no claim that ended badly
        case Frame():
            return replace(state, tokens=_extended(state.tokens, message), vain=min(1, state.vain))
        case Terminal():
            return replace(state, terminal=message)


def _extended(tokens: tuple[tuple[int, ...], ...], frame: Frame) -> tuple[tuple[int, ...], ...]:
    if not 0 <= frame.choice < len(tokens):
        raise ProtocolError(f"a frame of choice {frame.choice}, but the request has {len(tokens)}")
    known, new = tokens[frame.choice], unpack_tokens(frame.tokens)
    if frame.offset > len(known):
        raise ProtocolError(f"a frame at offset {frame.offset} follows {len(known)} tokens")
    overlap = known[frame.offset :]
    if overlap[: len(new)] != new[: len(overlap)]:
        raise ProtocolError(f"a frame at offset {frame.offset} contradicts the tokens before it")
    grown = known[: frame.offset] + new if len(new) > len(overlap) else known
    return (*tokens[: frame.choice], grown, *tokens[frame.choice + 1 :])


async def read(transport: Transport, request_id: str, choices: int) -> JournalState:
    """Everything that the journal holds of a request. A terminal is found by the last message alone.

    Raises:
        ProtocolError: a stored message is not of the stream, or contradicts another.
        Unavailable: the server does not answer.
    """
    subject = subjects.tokens(request_id)
    state = empty(choices)
    last = await transport.last(subjects.JOURNAL.name, subject)
    if last is None:
        return state
    final = _decoded(last)
    if isinstance(final, Terminal):
        return replace(state, sequence=last.sequence, attempt=final.attempt, terminal=final)
    while state.sequence < last.sequence:
        page = await transport.read(subjects.JOURNAL.name, subject, after=state.sequence, limit=_PAGE)
        if not page:
            break
        state = _folded(state, page)
    return state


async def last_only(transport: Transport, request_id: str, choices: int) -> JournalState:
    """A journal that cannot be read can still be closed: after its last message, whatever that is. Raises Unavailable."""
    last = await transport.last(subjects.JOURNAL.name, subjects.tokens(request_id))
    return replace(empty(choices), sequence=last.sequence if last else 0)


async def cancellations(transport: Transport, request_id: str) -> tuple[CancelRequest, ...]:
    """The journalled cancellations of a request, in their order: one for each choice that its reader cut, or one for
    all of it. One that cannot be read is none. Raises Unavailable."""
    subject = subjects.cancel(request_id)
    if await transport.last(subjects.CANCELS.name, subject) is None:  # the usual answer, and the cheapest
        return ()
    found = []
    for stored in await transport.read(subjects.CANCELS.name, subject, limit=_PAGE):
        try:
            found.append(codec.decode_as(CancelRequest, stored.data))
        except ProtocolError:
            log.warning("an unreadable cancellation of %s is ignored", request_id)
    return tuple(found)


async def may_be_cancelled(looking: Looking) -> bool:
    """Whether a look at the cancellations says that there is one, or nothing: a claim outlives a connection with which the look
    was lost."""
    try:
        return await looking.found() is not None
    except Unavailable:
        return True


def _folded(state: JournalState, page: Iterable[Received]) -> JournalState:
    for stored in page:
        state = fold(state, stored.sequence, _decoded(stored))
    return state


def _decoded(stored: Received) -> StreamMessage:
    message = codec.decode(stored.data)
    if not isinstance(message, Started | PromptScores | Frame | Terminal):
        raise ProtocolError(f"{type(message).__name__} does not belong into a journal")
    return message


class Journal:
    """The writer of one attempt. Not for concurrent use: the caller awaits one append before the next."""

    def __init__(
        self,
        transport: Transport,
        request_id: str,
        sequence: int,
        *,
        message_ids: str,
        clock: Clock,
        patience_s: float,
        headers: Mapping[str, str],
    ) -> None:
        """`sequence` is the last that is known; `message_ids` begins the message ids of this writer and of no other."""
        self._transport = transport
        self._subject = subjects.tokens(request_id)
        self._message_ids = message_ids
        self._sequence = sequence
        self._clock = clock
        self._patience_ns = int(patience_s * 1e9)
        self._headers = headers
        self._written = 0

    @property
    def sequence(self) -> int:
        """Of the last message that this writer knows."""
        return self._sequence

    async def append(self, message: StreamMessage, *, headers: Mapping[str, str] = _NONE) -> None:
        """Store the next message of the stream, with `headers` beside the writer's.

        An unreachable or full server is asked again within the patience; the message id makes that harmless.

        Raises:
            FencedOut: another attempt wrote in between. Stop.
            Unavailable, Overloaded: the patience is over.
        """
        data = codec.encode(message)
        message_id = f"{self._message_ids}-{self._written}"
        deadline = self._clock.monotonic_ns() + self._patience_ns
        for pause in _pauses():
            try:
                self._sequence = await self._store(data, message_id, headers)
            except (Unavailable, Overloaded):
                if self._clock.monotonic_ns() >= deadline:
                    raise
                await asyncio.sleep(pause)
            else:
                self._written += 1
                return

    async def _store(self, data: bytes, message_id: str, headers: Mapping[str, str]) -> int:
        try:
            stored = await self._transport.append(
                self._subject,
                data,
                message_id=message_id,
                expected_last_subject_sequence=self._sequence,
                headers={**self._headers, **headers},
            )
        except FencedOut:
            # An append whose answer was lost looks like a foreign one: the journal's last message tells which it was.
            last = await self._transport.last(subjects.JOURNAL.name, self._subject)
            if last is not None and last.sequence > self._sequence and last.data == data:
                return last.sequence
            raise
        return stored.sequence


def _pauses() -> Iterable[float]:
    """Seconds between tries: growing, then steady."""
    yield from _BACKOFF_S
    while True:
        yield _BACKOFF_S[-1]
