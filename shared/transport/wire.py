"""What JetStream needs of a connection, in raw messages; and the arithmetic of subjects and sizes.

`nats.py` implements `Wire` on nats-py, `jetstream.py` and `pull.py` speak the JetStream API through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from shared.errors import PayloadTooLarge, Unavailable
from shared.transport.base import Headers
from shared.transport.fields import Fields

_PREAMBLE_BYTES = len(b"NATS/1.0\r\n") + len(b"\r\n")
_FIELD_BYTES = len(b": ") + len(b"\r\n")


class Unanswered(Unavailable):
    """No answer in time: what was asked may have happened or not."""


class NobodyListens(Unavailable):
    """The server knows of no one on the subject: what was asked did not happen."""


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """A message with what the server added to it."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = {}
    reply: str = ""

    @property
    def status(self) -> str:
        """The status code of a server's message, "" for a message of somebody else."""
        headers = self.headers
        if isinstance(headers, Fields) and not headers.has_status:
            return ""
        return headers.get("Status", "")


class Wire(Protocol):
    """A connection that keeps itself up."""

    async def close(self) -> None:
        """End it for good. Idempotent."""

    async def connected(self, timeout: float) -> bool:
        """Wait until there is a connection. False after `timeout` seconds."""

    async def barrier(self, timeout: float) -> None:
        """Until the server has everything that was sent. Raises Unanswered or NobodyListens."""

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit for one message, headers included."""

    @property
    def server_version(self) -> str:
        """Of the server that we are connected to, as it says; "" before the first connection."""

    def inbox(self) -> str:
        """A new subject of our own."""

    async def send(
        self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None
    ) -> None:
        """Publish without waiting. Raises NobodyListens when even the reconnect buffer is full."""

    async def ask(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Raw:
        """One question, one answer. Raises Unanswered or NobodyListens."""

    async def pose(
        self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None, soon: bool = False
    ) -> Question:
        """`ask` in two: when this returns it is asked, and the answer is waited for later. `soon`: it can go with what is sent
        next in this turn. Raises what `ask` raises."""

    async def listen(self, subject: str, receive: Callable[[Raw], None], *, queue: str = "") -> Closer:
        """Hand every message on `subject` to `receive`, in order and without a pause between reading and that: it must
        not block, and what it keeps it bounds. The server has the subscription before whatever is sent after this."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call it after every reconnect."""

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call it when the connection has ended for good without our `close`."""


class Question(Protocol):
    """What `pose` asked."""

    async def answer(self) -> Raw:
        """The answer. Once. Raises Unanswered, when the time since the question is over, or NobodyListens."""

    def drop(self) -> None:
        """Nobody waits for it. Idempotent."""


class Closer(Protocol):
    """What `listen` began."""

    async def close(self) -> None:
        """End it. Idempotent; no error when the connection is gone."""


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject falls under a pattern with `*` (one token) and a final `>` (one or more)."""
    wanted = pattern.split(".")
    given = subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


def overlaps(one: str, other: str) -> bool:
    """Whether some subject falls under both patterns."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)


def message_bytes(data: bytes, headers: Headers | None) -> int:
    """What counts against the server's payload limit: the data and the encoded headers."""
    if not headers:
        return len(data)
    fields = sum(len(name.encode()) + len(value.encode()) + _FIELD_BYTES for name, value in headers.items())
    return _PREAMBLE_BYTES + fields + len(data)


def check_size(data: bytes, headers: Headers | None, limit: int) -> None:
    """Raises PayloadTooLarge: a message over the server's limit ends the connection, and for good."""
    if not _fits(data, headers, limit) and (size := message_bytes(data, headers)) > limit:
        raise PayloadTooLarge(f"a message of {size} bytes is over the limit of {limit}")


def _fits(data: bytes, headers: Headers | None, limit: int) -> bool:
    """Whether a message is under a limit without a doubt: every character counted as the longest there is."""
    if not headers:
        return len(data) <= limit
    characters = sum(map(len, headers)) + sum(map(len, headers.values()))
    return _PREAMBLE_BYTES + len(data) + len(headers) * _FIELD_BYTES + 4 * characters <= limit
