"""nats-py's client, with a shorter way for messages and without the faults of its reader. `nats.py` alone uses it.

The way, both of which a request's first token goes several times: nats-py hands what it reads to a task, which hands each
message to a task of its subscription through a queue, and each publish to a task that writes. Here a message goes from the
socket straight to who listens (`frames.py`), and a publish straight to the socket while that takes it (else to nats-py's
writer, which waits). What follows it in the same turn of the event loop goes at the turn's end, and a subscription with the
next publish or then: every call may cost the processor, which the server that it wakes takes over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import lru_cache
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
    def _flows(self) -> bool:
        """Whether what is sent goes to the socket without a wait."""
        writer = self._writer()
        return writer is not None and writer.transport.get_write_buffer_size() < _CONGESTED_BYTES

    def post(
        self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None, *, soon: bool = False
    ) -> bool:
        """`publish` without a wait, as nats-py would write it. False when nothing was done, since the socket is behind or this
        turn has much for it, there is none, or nats-py would refuse it: then `publish` tells, or waits. `soon`: it can go with
        the next publish of this turn."""
        if (
            not self._flows
            or self._pending_data_size >= _CONGESTED_BYTES
            or self.is_draining_pubs
            or len(data) > self._max_payload
            or (parts := message(subject, data, reply, headers)) is None
        ):
            return False
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(data)
        self._pending.append(parts)
        self._pending_data_size += len(parts)
        self._pass_on(soon=soon)
        return True

    def _pass_on(self, *, soon: bool) -> None:
        """What is pending to the socket: at once if it is the turn's first and need not wait, else at the turn's end."""
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)
        if not (self._written or soon):
            self._written = True
            self._write()

    # nats-py calls these

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if force_flush or not self._flows:
            return await super()._flush_pending(force_flush)
        self._pass_on(soon=self._lazy)
        return None

    def _end_turn(self) -> None:
        self._turn, self._written = None, False
        self._write()

    def _write(self) -> None:
        """What is pending, now; without a connection it stays, for the next one."""
        writer = self._writer()
        if writer is None:
            return
        if pending := self._pending:
            writer.write(pending[0] if len(pending) == 1 else b"".join(pending))
        # The size too when nothing was pending: nats-py adds its PINGs to it, which go by themselves.
        self._pending, self._pending_data_size = [], 0

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


def message(subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> bytes | None:
    """A publish as it goes over the wire, byte for byte nats-py's, without its patterns; None for what only those can judge."""
    if not (subject.isprintable() and reply.isprintable()) or " " in subject or " " in reply or not subject:
        return None
    if not headers:
        return b"".join((f"PUB {subject} {reply} {len(data)}\r\n".encode(), data, b"\r\n"))
    fields = []
    for name, value in headers.items():
        if not (_is_word(name) and value.isprintable() and value == value.strip()):
            return None
        fields.append(f"{name}: {value}\r\n")
    block = f"NATS/1.0\r\n{''.join(fields)}\r\n".encode()
    line = f"HPUB {subject} {reply} {len(block)} {len(block) + len(data)}\r\n"
    return b"".join((line.encode(), block, data, b"\r\n"))


@lru_cache(256)
def _is_word(name: str) -> bool:
    """Whether a header's name goes over the wire as it stands. There are few."""
    return name.isascii() and name.replace("-", "").isalnum()
