"""The JetStream API over a `Wire`: streams and consumers made as their specs say, appends with a clear outcome, reads.

An append whose answer is lost is never guessed: with an expected sequence the stream is asked what follows it, with a
message id the same message is sent again and the server tells a duplicate. Every append gets one of the two.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from typing import Any, Final

from shared.errors import (
    BurstlineError,
    Conflict,
    FencedOut,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from shared.protocol.subjects import ConsumerSpec, StreamSpec
from shared.transport.base import Headers, Received, Stored
from shared.transport.wire import NobodyListens, Raw, Unanswered, Wire

_log = logging.getLogger(__name__)

API_TIMEOUT_S: Final = 5.0
ENSURE_TRIES: Final = 6
_NS: Final = 1_000_000_000
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
    answer = await wire.ask(f"$JS.API.{operation}", json.dumps(body).encode(), timeout=timeout)
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
        body = json.loads(data)
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


# ---- streams and consumers -------------------------------------------------------------------------------------------


def stream_config(spec: StreamSpec) -> dict[str, Any]:
    """The fields of a stream that are ours; others (replicas, placement) belong to who runs the server.

    A full stream refuses (discard new): dropping the oldest would lose work that was accepted.
    """
    config: dict[str, Any] = {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "workqueue" if spec.work_queue else "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": spec.max_bytes,
        "max_age": spec.max_age_s * _NS,
        "max_msg_size": spec.max_msg_bytes,
        "max_msgs_per_subject": spec.max_msgs_per_subject,
        "duplicate_window": spec.duplicate_window_s * _NS,
        "allow_direct": True,
    }
    if spec.bells is not None:
        tail = spec.subjects[0].partition(".")[2]
        config["republish"] = {
            "src": spec.subjects[0],
            "dest": f"{spec.bells}.{tail}",
            "headers_only": True,
        }
    return config


async def ensure_stream(wire: Wire, spec: StreamSpec) -> None:
    """Create the stream, or bring the one that is to the spec. Raises Conflict naming the field that cannot change."""
    wanted = stream_config(spec)
    try:
        await insist(wire, f"STREAM.CREATE.{spec.name}", {**wanted, "num_replicas": 1})
        return
    except Conflict:
        known = (await call(wire, f"STREAM.INFO.{spec.name}", {}))["config"]
    drift = differing(wanted, known)
    if not drift:
        return
    try:
        await insist(wire, f"STREAM.UPDATE.{spec.name}", {**known, **wanted})
    except Unavailable as error:
        if isinstance(error, Unanswered | NobodyListens):
            raise
        raise Conflict(
            f"stream {spec.name} differs in {', '.join(drift)} and the server keeps it: {error}"
        ) from error


def consumer_config(spec: ConsumerSpec) -> dict[str, Any]:
    """The fields of a durable pull consumer. `max_deliver` is unlimited: poison is ours to count."""
    config: dict[str, Any] = {
        "name": spec.durable,
        "durable_name": spec.durable,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "replay_policy": "instant",
        "ack_wait": int(spec.ack_wait_s * _NS),
        "max_ack_pending": spec.max_ack_pending,
        "max_deliver": -1,
        "max_waiting": 512,
        "filter_subject": spec.filter_subject,
    }
    if spec.idle_limit_s is not None:
        config["inactive_threshold"] = int(spec.idle_limit_s * _NS)
    if spec.group is not None:
        config["priority_policy"] = "prioritized"
        config["priority_groups"] = [spec.group]
    return config


async def ensure_consumer(wire: Wire, spec: ConsumerSpec) -> None:
    """Create or update the consumer. Raises Conflict naming what differs when the server cannot change it, NotFound
    without its stream."""
    wanted = consumer_config(spec)
    operation = f"CONSUMER.CREATE.{spec.stream}.{spec.durable}.{spec.filter_subject}"
    try:
        await insist(wire, operation, {"stream_name": spec.stream, "config": wanted, "action": ""})
        return
    except Unavailable as error:
        if isinstance(error, Unanswered | NobodyListens):
            raise
        refusal = error
    try:
        known = (await call(wire, f"CONSUMER.INFO.{spec.stream}.{spec.durable}", {}))["config"]
    except NotFound:
        raise Conflict(f"consumer {spec.durable} was refused: {refusal}") from refusal
    drift = ", ".join(differing(wanted, known)) or "nothing that we set"
    raise Conflict(
        f"consumer {spec.durable} differs in {drift} and the server keeps it: {refusal}"
    ) from refusal


def differing(wanted: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """The fields of `wanted` that `known` has otherwise (a field at its zero value may be absent there)."""
    return [name for name, value in wanted.items() if known.get(name, type(value)()) != value]


# ---- append ----------------------------------------------------------------------------------------------------------


async def append(
    wire: Wire,
    stream: str | None,
    subject: str,
    data: bytes,
    *,
    message_id: str | None,
    expected: int | None,
    headers: Headers | None,
    timeout: float,
) -> Stored:
    """Publish and wait until stored. `stream` holds `subject` (None = unknown; then an expectation that the server
    refuses is FencedOut without a second look).

    Raises:
        FencedOut, Overloaded, PayloadTooLarge: nothing was stored.
        Unavailable: nobody answered; if it was stored, the same append again finds it.
    """
    sent = dict(headers or {})
    if expected is not None:
        sent[EXPECTED_SEQUENCE] = str(expected)
    if message_id is None and expected is None:
        message_id = uuid.uuid4().hex
    if message_id is not None:
        sent[MESSAGE_ID] = message_id
    for attempt in range(1, _TRIES + 1):
        try:
            answer = parse((await wire.ask(subject, data, timeout=timeout / _TRIES, headers=sent)).data)
            return Stored(sequence=int(answer["seq"]), duplicate=bool(answer.get("duplicate", False)))
        except FencedOut:
            stored = await _stored_already(wire, stream, subject, data, expected)
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
    answer = await wire.ask(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", timeout=API_TIMEOUT_S)
    if answer.status == "404":
        return None
    _check_direct(answer)
    return received(answer)


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
        await wire.send(f"$JS.API.DIRECT.GET.{stream}", json.dumps(body).encode(), reply=inbox)
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


def clean(headers: Headers) -> dict[str, str]:
    """Headers as the sender gave them."""
    return {name: value for name, value in headers.items() if not name.startswith("Nats-")}
