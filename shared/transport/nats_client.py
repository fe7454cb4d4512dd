"""nats-py's client, with a shorter way for messages and without the faults of its reader. `nats.py` alone uses it.

The way, both of which a request's first token goes several times: nats-py hands what it reads to a task, which hands each
message to a task of its subscription through a queue, and each publish to a task that writes. Here a message goes from the
socket straight to who listens (`frames.py`), and a publish straight to the socket while that takes it (else to nats-py's
writer, which waits). What follows it in the same turn of the event loop goes at the turn's end, and a subscription with the
next publish or then: every call may cost the processor, which the server that it wakes takes over.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from shared.transport.frames import Receive, Splitter

_CONGESTED_BYTES: Final = 64 << 10
"""Of unsent data at the socket; beyond it a publish waits its turn."""


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

    @property
    def flows(self) -> bool:
        """Whether a publish goes to the socket without a wait."""
        writer = self._writer()
        return writer is not None and writer.transport.get_write_buffer_size() < _CONGESTED_BYTES

    # nats-py calls these

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: dict[str, Any] | None
    ) -> None:
        """As nats-py does it, but for a pattern for each header."""
        if headers is None or not all(map(_plain, headers, headers.values())):
            await super()._send_publish(subject, reply, payload, payload_size, headers)
            return
        fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        block = f"NATS/1.0\r\n{fields}\r\n".encode()
        line = f"HPUB {subject} {reply} {len(block)} {len(block) + payload_size}\r\n"
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        await self._send_command(b"".join((line.encode(), block, payload, b"\r\n")))
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if force_flush or not self.flows:
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
        writer = self._writer()
        if writer is not None:
            streams = writer.transport.get_protocol()
            writer.transport.set_protocol(Splitter(cast("asyncio.Protocol", streams), self._receivers))
        await super()._read_loop()
        if self.is_connected:
            await self._process_op_err(nats_errors.UnexpectedEOF())


def _plain(name: str, value: str) -> bool:
    """Whether a header goes over the wire as it stands."""
    return (
        name.isascii() and name.replace("-", "").isalnum() and value.isprintable() and value == value.strip()
    )
