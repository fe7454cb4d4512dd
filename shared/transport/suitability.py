"""Is this NATS server one that keeps what it acknowledges? Asked once a connection, before streams are made (FR-100).

Some releases acknowledged messages that a full work queue did not keep, and every promise here rests on that answer. So
the server's version is checked, and the promise itself is tried: a tiny work queue that refuses when full is filled
beyond its limits, and what was acknowledged is compared with what is there. The queue is called
`BURSTLINE_TEST_<random>`, lives for a moment, and needs the same permissions as our own streams.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any, Final

from shared.errors import Overloaded, Unavailable
from shared.transport.jetstream import API_TIMEOUT_S, MESSAGE_ID, call, parse
from shared.transport.wire import NobodyListens, Wire

OLDEST: Final = (2, 11)
"""The first with batched direct reads, which resuming a stream needs; far above the releases that lost messages."""

_KEPT: Final = 4
_SENT: Final = 12
_BODY: Final = b"x" * 64


class Unsuitable(Unavailable):
    """The server cannot carry this system; the message says what to do."""

    code = "nats_unsuitable"


async def check(wire: Wire) -> None:
    """Pass a server that is new enough, has JetStream, and keeps its word.

    Raises:
        Unsuitable: it does not.
        Unavailable: it did not answer.
    """
    _check_version(wire.server_version)
    try:
        await call(wire, "INFO", {})
    except NobodyListens:
        raise Unsuitable(
            "the NATS server has no JetStream: start it with -js, or with a jetstream block"
        ) from None
    except Unavailable as error:
        raise Unsuitable(f"JetStream is not to be used here: {error.message}") from error
    name = f"BURSTLINE_TEST_{uuid.uuid4().hex[:12]}"
    subject = f"burstline.test.{name}"
    try:
        await call(wire, f"STREAM.CREATE.{name}", _queue(name, subject))
        await _try(wire, name, subject)
    finally:
        await _delete(wire, name)


def _check_version(version: str) -> None:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Unsuitable(f"the NATS server's version is {version or 'unknown'}; {oldest} or newer is needed")


def _queue(name: str, subject: str) -> dict[str, Any]:
    """As our own work queue, with both limits within reach."""
    return {
        "name": name,
        "subjects": [subject],
        "retention": "workqueue",
        "storage": "file",
        "discard": "new",
        "max_msgs": _KEPT,
        "max_bytes": 4096,
        "max_age": 60 * 10**9,
        "duplicate_window": 10**9,
        "num_replicas": 1,
    }


async def _try(wire: Wire, name: str, subject: str) -> None:
    """Send more than there is room for. Raises Unsuitable when the answers and the stream differ."""
    acknowledged = 0
    for number in range(_SENT):
        answer = await wire.ask(
            subject, _BODY, timeout=API_TIMEOUT_S, headers={MESSAGE_ID: f"{name}-{number}"}
        )
        try:
            parse(answer.data)
        except Overloaded:
            continue
        acknowledged += 1
    state = (await call(wire, f"STREAM.INFO.{name}", {}))["state"]
    if int(state["messages"]) != acknowledged or acknowledged != _KEPT:
        raise Unsuitable(
            f"the NATS server acknowledged {acknowledged} of {_SENT} messages to a queue with room for {_KEPT} and kept "
            f"{state['messages']}: it would lose requests; use another release"
        )


async def _delete(wire: Wire, name: str) -> None:
    """Best effort: what the server cannot delete now is empty in a minute."""
    try:
        await wire.ask(f"$JS.API.STREAM.DELETE.{name}", json.dumps({}).encode(), timeout=API_TIMEOUT_S)
    except Unavailable:
        return
