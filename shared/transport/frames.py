"""What a NATS connection brings, cut into frames: messages go straight to who hears them, all else to nats-py.

nats-py hands what it reads to a task, through a buffer, and tries half a dozen patterns on it. A request's first token
would pay for that with each of its messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from shared.transport.wire import Raw

_log = logging.getLogger(__name__)

_LINE: Final = b"\r\n"
_MESSAGES: Final = (b"MSG ", b"HMSG ")
_VERSION: Final = "NATS/1.0"

Receive = Callable[[Raw], None]


class Splitter(asyncio.Protocol):
    """The protocol of a connection, before the one that nats-py reads from.

    MSG subject sid [reply] size              payload
    HMSG subject sid [reply] head size        headers, `head` bytes of the `size`, and payload
    anything else                             a line, which is passed on
    """

    def __init__(self, streams: asyncio.Protocol, receivers: Mapping[int, Receive]) -> None:
        """`receivers` by the id of their subscription; a message of another is passed on."""
        self._streams: Final = streams
        self._receivers: Final = receivers
        self._left = b""  # of a frame that is not here to its end

    def data_received(self, data: bytes) -> None:
        if self._left:
            data = self._left + data
        at = 0
        while (end := data.find(_LINE, at)) >= 0:
            begin = end = end + len(_LINE)
            if data.startswith(_MESSAGES, at):
                fields = data[at:begin].split()
                if len(fields) not in (4, 5, 6) or not fields[-1].isdigit():
                    self._streams.data_received(data[at:])  # nats-py says what is wrong with it
                    at = len(data)
                    break
                end += int(fields[-1])
                if len(data) < end + len(_LINE):
                    break
                receive = self._receivers.get(int(fields[2]))
                if receive is not None:
                    deliver(receive, fields, data[begin:end])
                    at = end + len(_LINE)
                    continue
                end += len(_LINE)
            self._streams.data_received(data[at:end])
            at = end
        self._left = data[at:]

    def eof_received(self) -> bool | None:
        return self._streams.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.connection_lost(exc)

    def pause_writing(self) -> None:
        self._streams.pause_writing()

    def resume_writing(self) -> None:
        self._streams.resume_writing()


def deliver(receive: Receive, fields: list[bytes], data: bytes) -> None:
    """Hand over a message: the fields of its line, and what follows that."""
    head = int(fields[-2]) if fields[0] == b"HMSG" else 0
    reply = fields[3].decode() if len(fields) == (6 if head else 5) else ""
    raw = Raw(
        subject=fields[1].decode(),
        data=data[head:] if head else data,
        headers=parse_headers(data[:head]) if head else {},
        reply=reply,
    )
    try:
        receive(raw)
    except Exception:  # noqa: BLE001 - one listener's fault must not end the reading for all the others
        _log.exception("a listener on %s failed", raw.subject.partition(".")[0])


def parse_headers(block: bytes) -> dict[str, str]:
    """A header block as a dictionary; the server's own status, which stands in the first line, as Status and
    Description. A line that is no field is passed over."""
    first, *lines = block.decode("utf-8", "replace").split("\r\n")
    found: dict[str, str] = {}
    status, _, description = first.removeprefix(_VERSION).strip().partition(" ")
    if status:
        found["Status"] = status
    if description:
        found["Description"] = description.strip()
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip()] = value.strip()
    return found
