"""What a NATS connection brings, cut into frames: messages go straight to who hears them, all else to nats-py.

nats-py hands what it reads to a task, through a buffer, and tries half a dozen patterns on it. A request's first token
would pay for that with each of its messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from nats.errors import ProtocolError

from shared.transport.fields import Fields
from shared.transport.wire import Raw

_log = logging.getLogger(__name__)

_LINE: Final = b"\r\n"
_MESSAGES: Final = (b"MSG ", b"HMSG ")
_LONGEST_LINE: Final = 1 << 20
"""Bytes. INFO is the longest, with the addresses of a cluster."""

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
        self._left: list[bytes] = []  # of a frame that is not here to its end
        self._missing = 0  # so many bytes must come before another look at it can tell anything

    def data_received(self, data: bytes) -> None:
        """Raises ProtocolError over what is no message: the event loop ends the connection, and nats-py makes a new one."""
        if self._left:
            self._left.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = b"".join(self._left)
        at = 0
        while (end := data.find(_LINE, at)) >= 0:
            begin = end = end + len(_LINE)
            if data.startswith(_MESSAGES, at):
                fields = data[at:begin].split()
                if not _is_whole(fields):
                    raise ProtocolError
                end += int(fields[-1])
                self._missing = end + len(_LINE) - len(data)
                if self._missing > 0:
                    break
                receive = self._receivers.get(int(fields[2]))
                if receive is not None:
                    deliver(receive, fields, data[begin:end])
                    at = end + len(_LINE)
                    continue
                end += len(_LINE)
            self._streams.data_received(data[at:end])
            at = end
        if self._missing <= 0 and len(data) - at > _LONGEST_LINE:
            raise ProtocolError
        self._left = [data[at:]] if at < len(data) else []

    def eof_received(self) -> bool | None:
        return self._streams.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.connection_lost(exc)

    def pause_writing(self) -> None:
        self._streams.pause_writing()

    def resume_writing(self) -> None:
        self._streams.resume_writing()


def _is_whole(fields: list[bytes]) -> bool:
    """Whether these are the fields of a message's line, with its numbers."""
    sizes = fields[-2:] if fields[0] == b"HMSG" else fields[-1:]
    return (
        len(fields) - len(sizes) in (3, 4)
        and all(map(bytes.isdigit, (fields[2], *sizes)))
        and int(sizes[0]) <= int(sizes[-1])
    )


def deliver(receive: Receive, fields: list[bytes], data: bytes) -> None:
    """Hand over a message: the fields of its line, and what follows that."""
    sizes = 2 if fields[0] == b"HMSG" else 1
    head = int(fields[-2]) if sizes == 2 else 0
    reply = fields[3].decode("utf-8", "replace") if len(fields) - sizes == 4 else ""
    raw = Raw(
        subject=fields[1].decode("utf-8", "replace"),
        data=data[head:] if head else data,
        headers=Fields(data[:head]) if head else {},
        reply=reply,
    )
    try:
        receive(raw)
    except Exception:  # noqa: BLE001 - one listener's fault must not end the reading for all the others
        _log.exception("a listener on %s failed", raw.subject.partition(".")[0])
