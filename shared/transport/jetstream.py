"""The JetStream API over a `Wire`: calls and their errors, appends with a clear outcome, reads.

An append whose answer is lost is never guessed: with an expected sequence the stream is asked what follows it, with a
message id the same message is sent again and the server tells a duplicate. Every append gets one of the two.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any, Final

import msgspec

from shared.errors import (
    BurstlineError,
    Conflict,
    FencedOut,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from shared.transport.base import Headers, Received, Stored
from shared.transport.fields import clean
from shared.transport.wire import NobodyListens, Question, Raw, Unanswered, Wire, check_size

_log = logging.getLogger(__name__)

API_TIMEOUT_S: Final = 5.0
ENSURE_TRIES: Final = 6
_TRIES: Final = 3
_PAUSE_S: Final = 0.1

_WRONG_LAST_SEQUENCE: Final = frozenset({10071, 10164})
_NO_ROOM: Final = frozenset({10023, 10028, 10047, 10077})  # account, memory, disk, the stream's own limits
_TOO_LARGE: Final = frozenset({10054})
_NAME_IN_USE: Final = frozenset({10058})
_NOT_FOUND: Final = frozenset(
    {10014, 10037, 10043, 10057, 10059}
)  # consumer, message, sequence, deletion of one, stream

MESSAGE_ID: Final = "Nats-Msg-Id"
EXPECTED_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"


async def call(
    wire: Wire, operation: str, body: dict[str, Any], *, timeout: float = API_TIMEOUT_S
) -> dict[str, Any]:
    """One call of the JetStream API. Raises the error that the server names, in our words."""
    answer = await wire.ask(f"$JS.API.{operation}", msgspec.json.encode(body), timeout=timeout)
    return parse(answer.data)


async def insist(wire: Wire, operation: str, body: dict[str, Any]) -> dict[str, Any]:
    """`call` for what may be repeated: a server that is slow (many start at once, a cold disk) gets several times."""
    for _ in range(ENSURE_TRIES - 1):
        try:
            return await call(wire, operation, body)
        except Unanswered:
            _log.warning("%s: no answer within %g s, asking again", operation, API_TIMEOUT_S)
    return await call(wire, operation, body)


def parse(data: bytes) -> dict[str, Any]:
    """The body of an API answer or of a publish acknowledgement; raises the error in it."""
    try:
        body = msgspec.json.decode(data)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Unavailable("the message server gave an answer that is no JSON object")
    if "error" in body:
        raise translate(body["error"])
    return body


def translate(error: dict[str, Any]) -> BurstlineError:
    """A server error in our words, by its `err_code`."""
    code = int(error.get("err_code", 0))
    text = f"{error.get('description', 'unknown error')} (JetStream {code})"
    if code in _WRONG_LAST_SEQUENCE:
        return FencedOut(text)
    if code in _NO_ROOM:
        return Overloaded(text)
    if code in _TOO_LARGE:
        return PayloadTooLarge(text)
    if code in _NAME_IN_USE:
        return Conflict(text)
    if code in _NOT_FOUND:
        return NotFound(text)
    return Unavailable(text)


# ---- append ----------------------------------------------------------------------------------------------------------


def stamped(headers: Headers | None, message_id: str | None, expected: int | None) -> dict[str, str]:
    """The headers of an append: its own, and those by which the server knows it again or refuses it."""
    sent = dict(headers or {})
    if expected is not None:
        sent[EXPECTED_SEQUENCE] = str(expected)
    if message_id is None and expected is None:
        message_id = uuid.uuid4().hex
    if message_id is not None:
        sent[MESSAGE_ID] = message_id
    return sent


async def append(
    wire: Wire,
    stream_of: Callable[[], str | None],
    subject: str,
    data: bytes,
    *,
    message_id: str | None,
    expected: int | None,
    headers: Headers | None,
    timeout: float,
) -> Stored:
    """Publish and wait until stored. `stream_of` tells which stream holds `subject`, if that is asked (None = unknown; then
    an expectation that the server refuses is FencedOut without a second look).

    Raises:
        FencedOut, Overloaded, PayloadTooLarge: nothing was stored.
        Unavailable: nobody answered; if it was stored, the same append again finds it.
    """
    sent = stamped(headers, message_id, expected)
    check_size(data, sent, wire.max_payload_bytes)
    for attempt in range(1, _TRIES + 1):
        try:
            answer = parse((await wire.ask(subject, data, timeout=timeout / _TRIES, headers=sent)).data)
            return Stored(sequence=int(answer["seq"]), duplicate=bool(answer.get("duplicate", False)))
        except FencedOut:
            stored = await _stored_already(wire, stream_of(), subject, data, expected)
            if stored is None:
                raise
            return stored
        except Unavailable:
            if attempt == _TRIES:
                raise
            await asyncio.sleep(_PAUSE_S)
            await wire.connected(timeout / _TRIES)
    raise AssertionError("the last try returns or raises")


async def _stored_already(
    wire: Wire, stream: str | None, subject: str, data: bytes, expected: int | None
) -> Stored | None:
    """Whether what follows `expected` on the subject is this very message: an earlier try of it got through."""
    if stream is None or expected is None:
        return None
    after = await read(wire, stream, subject, after=expected, limit=1)
    if after and after[0].data == data:
        return Stored(sequence=after[0].sequence, duplicate=True)
    return None


async def waiting(wire: Wire, stream: str, pattern: str) -> dict[str, int]:
    """Messages of a stream by subject, those under `pattern` (of the first 100,000 subjects)."""
    state = (await call(wire, f"STREAM.INFO.{stream}", {"subjects_filter": pattern}))["state"]
    return {subject: int(count) for subject, count in (state.get("subjects") or {}).items()}


# ---- read ------------------------------------------------------------------------------------------------------------


async def last(wire: Wire, stream: str, subject: str) -> Received | None:
    """The newest stored message of a subject, by direct get."""
    return await (await look(wire, stream, subject, soon=False)).found()


class Looking:
    """A `Looking` of the transport's."""

    def __init__(self, question: Question) -> None:
        self._question = question

    async def found(self) -> Received | None:
        answer = await self._question.answer()
        if answer.status == "404":
            return None
        _check_direct(answer)
        return received(answer)

    def drop(self) -> None:
        self._question.drop()


async def look(wire: Wire, stream: str, subject: str, *, soon: bool) -> Looking:
    """The same in two. `soon`: the question goes with what is sent next."""
    asked = f"$JS.API.DIRECT.GET.{stream}.{subject}"
    return Looking(await wire.pose(asked, b"", timeout=API_TIMEOUT_S, soon=soon))


async def read(wire: Wire, stream: str, subject: str, *, after: int, limit: int) -> list[Received]:
    """Stored messages of a subject, ascending, by one batched direct get."""
    if limit < 1:
        return []
    body = {"seq": after + 1, "next_by_subj": subject, "batch": limit}
    answers: asyncio.Queue[Raw] = asyncio.Queue()
    inbox = wire.inbox()
    listening = await wire.listen(inbox, answers.put_nowait)
    found: list[Received] = []
    try:
        await wire.send(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(body), reply=inbox)
        async with asyncio.timeout(API_TIMEOUT_S):
            while True:
                answer = await answers.get()
                if answer.status in ("204", "404"):  # end of batch, nothing found
                    return found
                _check_direct(answer)
                found.append(received(answer))
    except TimeoutError:
        raise Unanswered(f"reading {stream} took more than {API_TIMEOUT_S:g} s") from None
    finally:
        await listening.close()


def _check_direct(answer: Raw) -> None:
    """Raise unless an answer to a direct get is a message."""
    if answer.status == "503":
        raise NobodyListens("the stream is not there, or not yet")
    if answer.status:
        raise Unavailable(f"direct get: {answer.status} {answer.headers.get('Description', '')}".rstrip())


def received(raw: Raw) -> Received:
    """A stored message without what the server added."""
    return Received(
        subject=raw.headers.get("Nats-Subject", raw.subject),
        data=raw.data,
        headers=clean(raw.headers),
        sequence=int(raw.headers.get("Nats-Sequence", "0")),
    )
