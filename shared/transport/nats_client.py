"""nats-py's client, with a shorter way for messages and without the faults of its reader. `nats.py` alone uses it.

The way, both of which a request's first token goes several times: nats-py hands each message to a task of its
subscription through a queue, and each publish to a task that writes. Here a message goes from the reader straight to
who listens, and a publish straight to the socket while that takes it (else to nats-py's writer, which waits). What follows
it in the same turn of the event loop goes at the turn's end, and a subscription with the next publish or then: every call
may cost the processor, which the server that it wakes takes over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from shared.transport.wire import Raw

_log = logging.getLogger(__name__)

_LINE: Final = b"\r\n"
_VERSION: Final = b"NATS/1.0"
_CONGESTED_BYTES: Final = 64 << 10
"""Of unsent data at the socket; beyond it a publish waits its turn."""

Receive = Callable[[Raw], None]


class PatientClient(Client):
    """nats-py stops reading for good at any error in what it reads, says it is connected, and notices a minute later.

    Such an error is a PONG for a flush that nobody waits for any more, because its caller was cancelled or gave up: every
    slow answer, and every caller who leaves at the wrong moment. Here that PONG is counted, and a reader that ends by any
    other error is a lost connection at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._receivers: dict[int, Receive] = {}
        self._turn: asyncio.Handle | None = None  # what is to be done at this turn's end
        self._written = False  # something was, in this turn
        self._lazy = False  # what is sent now can go with the next publish

    async def hear(self, subject: str, queue: str, receive: Receive) -> Subscription:
        """Hand every message on `subject` to `receive`, in order, as it is read. `unhear` ends it."""
        sid = self._sid + 1  # the one that `subscribe` takes, before it waits for anything
        self._receivers[sid], self._lazy = receive, True
        try:
            return await self.subscribe(subject, queue)
        except BaseException:
            del self._receivers[sid]
            raise
        finally:
            self._lazy = False

    async def unhear(self, subscription: Subscription) -> None:
        """End it. Raises what nats-py raises when the server is away."""
        self._receivers.pop(subscription._id, None)
        self._lazy = True
        try:
            await subscription.unsubscribe()
        finally:
            self._lazy = False

    async def flush(self, timeout: float = 10) -> None:
        """A PING and its PONG. nats-py's own waits by `asyncio.wait_for`, which before Python 3.12 loses a cancellation that
        comes with the PONG: its caller then goes on as if nobody had asked it to end.

        Raises:
            ConnectionClosedError, FlushTimeoutError
        """
        if self.is_closed:
            raise nats_errors.ConnectionClosedError
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._send_ping(pong)
                await pong
        except TimeoutError:
            raise nats_errors.FlushTimeoutError from None

    # nats-py calls these

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        receive = self._receivers.get(sid)
        if receive is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        raw = Raw(subject=subject.decode(), data=data, headers=parse_headers(headers), reply=reply.decode())
        try:
            receive(raw)
        except Exception:  # noqa: BLE001 - one listener's fault must not end the reading for all the others
            _log.exception("a listener on %s failed", raw.subject.partition(".")[0])

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        writer = self._writer()
        if force_flush or writer is None or writer.transport.get_write_buffer_size() >= _CONGESTED_BYTES:
            return await super()._flush_pending(force_flush)
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)
        if not (self._written or self._lazy):
            self._written = True
            self._write()
        return None

    def _end_turn(self) -> None:
        self._turn, self._written = None, False
        self._write()

    def _write(self) -> None:
        """What is pending, now; without a connection it stays, for the next one."""
        writer = self._writer()
        if writer is not None and self._pending:
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            writer.writelines(pending)

    def _writer(self) -> asyncio.StreamWriter | None:
        """The socket's, while there is a connection."""
        if self.is_connected and isinstance(self._transport, TcpTransport):
            return self._transport._io_writer
        return None

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _read_loop(self) -> None:
        await super()._read_loop()
        if self.is_connected:
            await self._process_op_err(nats_errors.UnexpectedEOF())


def parse_headers(block: bytes | None) -> dict[str, str]:
    """A header block as a dictionary; the server's own status, which stands in the first line, as Status and
    Description. A line that is no field is passed over."""
    if not block:
        return {}
    first, *lines = block.split(_LINE)
    found: dict[str, str] = {}
    status, _, description = first.removeprefix(_VERSION).strip().partition(b" ")
    if status:
        found["Status"] = status.decode("utf-8", "replace")
    if description:
        found["Description"] = description.decode("utf-8", "replace").strip()
    for line in lines:
        name, colon, value = line.partition(b":")
        if colon:
            found[name.decode("utf-8", "replace").strip()] = value.decode("utf-8", "replace").strip()
    return found
