"""The twin of NATS in one process: the same semantics (tests/contract), no server.

Several `MemoryTransport`s on one `MemoryServer` are several connections. Acknowledgement waits, duplicate windows and
ages go by the clock given; time-outs of calls go by the event loop. What is refused by a stream still reaches plain
subscribers, as with NATS.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from shared.clock import SYSTEM, Clock
from shared.errors import NotFound, Unavailable
from shared.protocol.subjects import ConsumerSpec, StreamSpec
from shared.transport import jetstream
from shared.transport.base import Delivery, Handler, Headers, PullConsumer, Received, Stored, Subscription
from shared.transport.buffer import Buffer
from shared.transport.memory_stream import Consumer, MemoryStream
from shared.transport.service import Service
from shared.transport.wire import check_size, matches


@dataclass(eq=False)
class _Listener:
    pattern: str
    buffer: Buffer


@dataclass
class _Looking:
    message: Received | None

    async def found(self) -> Received | None:
        return self.message

    def drop(self) -> None:
        """It is answered."""


@dataclass(eq=False)
class _Responder:
    pattern: str
    queue: str
    service: Service


class MemoryServer:
    """What all connections share."""

    def __init__(self, *, clock: Clock = SYSTEM, max_payload_bytes: int = 1 << 20) -> None:
        self.clock = clock
        self.max_payload_bytes = max_payload_bytes
        self.online = True
        self.listeners: list[_Listener] = []
        self.responders: list[_Responder] = []
        self.streams: dict[str, MemoryStream] = {}
        self._turn = 0

    def transport(self) -> MemoryTransport:
        """A new connection."""
        return MemoryTransport(self)

    def deliver(self, message: Received) -> None:
        """Hand a message to the plain subscribers of its subject."""
        for listener in list(self.listeners):
            if matches(listener.pattern, message.subject):
                listener.buffer.offer(message)

    def responder(self, subject: str) -> _Responder | None:
        """One of those who answer on `subject`, in turns."""
        found = [known for known in self.responders if matches(known.pattern, subject)]
        self._turn += 1
        return found[self._turn % len(found)] if found else None

    def stream_of(self, subject: str) -> MemoryStream:
        """The stream that holds `subject`. Raises Unavailable without one."""
        for stream in self.streams.values():
            if stream.holds(subject):
                return stream
        raise Unavailable(f"no stream holds {subject.partition('.')[0]}.…")

    def stream(self, name: str) -> MemoryStream:
        """A stream by name. Raises Unavailable without one."""
        found = self.streams.get(name)
        if found is None:
            raise Unavailable(f"there is no stream {name}")
        return found


class MemoryTransport:
    """A connection to a `MemoryServer` (its own, unless one is given)."""

    def __init__(self, server: MemoryServer | None = None) -> None:
        self.server = server or MemoryServer()
        self._open: list[Subscription] = []
        self._closed = False

    async def close(self) -> None:
        for subscription in list(self._open):
            await subscription.close()
        self._closed = True

    async def ready(self) -> bool:
        return self.server.online and not self._closed

    @property
    def max_payload_bytes(self) -> int:
        return self.server.max_payload_bytes

    # core

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        message = self._message(subject, data, headers)
        self.server.deliver(message)
        await asyncio.sleep(0)  # as a real publish: others may run

    async def subscribe(self, subject: str, *, settled: bool = True) -> Subscription:
        self._check()
        buffer = Buffer(lambda: self._drop(listener))
        listener = _Listener(subject, buffer)
        self.server.listeners.append(listener)
        self._open.append(buffer)
        return buffer

    async def request(
        self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None
    ) -> bytes:
        message = self._message(subject, data, headers)
        responder = self.server.responder(subject)
        if responder is None:
            raise Unavailable(f"nobody answers on {subject}")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def reply(result: bytes | None) -> None:
            if not answer.done():
                if result is None:
                    answer.set_exception(Unavailable(f"the call on {subject} failed at the other side"))
                else:
                    answer.set_result(result)

        if not responder.service.offer(message, reply):
            raise Unavailable(f"nobody on {subject} has room")
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise Unavailable(f"no answer on {subject} within {timeout:g} s") from None

    async def serve(self, subject: str, queue: str, handler: Handler, *, concurrency: int) -> Subscription:
        self._check()
        service = Service(handler, concurrency, lambda: self._drop(responder))
        responder = _Responder(subject, queue, service)
        self.server.responders.append(responder)
        self._open.append(service)
        return service

    # streams

    async def ensure_stream(self, spec: StreamSpec) -> None:
        self._check()
        known = self.server.streams.get(spec.name)
        if known is None:
            self.server.streams[spec.name] = MemoryStream(spec, self.server.clock)
        else:
            known.update(spec)

    async def ensure_consumer(self, spec: ConsumerSpec) -> PullConsumer:
        self._check()
        return _Pull(self, self.server.stream(spec.stream).ensure_consumer(spec))

    async def take(self, spec: ConsumerSpec, *, priority: int = 0) -> Delivery | None:
        self._check()
        await asyncio.sleep(0)
        consumer = self.server.stream(spec.stream).ensure_consumer(spec)
        taken = consumer.take(1) if not (priority and consumer.waiters) else []
        return taken[0] if taken else None

    async def drop_consumer(self, stream: str, durable: str) -> None:
        self._check()
        self.server.stream(stream).consumers.pop(durable, None)

    async def waiting(self, stream: str, pattern: str) -> dict[str, int]:
        self._check()
        return self.server.stream(stream).waiting(pattern)

    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str | None = None,
        expected_last_subject_sequence: int | None = None,
        headers: Headers | None = None,
        timeout: float = 5.0,
    ) -> Stored:
        message = self._message(subject, data, headers)
        sent = jetstream.stamped(headers, message_id, expected_last_subject_sequence)
        check_size(data, sent, self.server.max_payload_bytes)
        self.server.deliver(message)
        await asyncio.sleep(0)
        stream = self.server.stream_of(subject)
        stored = stream.append(message, message_id, expected_last_subject_sequence)
        if stream.spec.bells is not None and not stored.duplicate:
            bell = f"{stream.spec.bells}.{subject.partition('.')[2]}"
            self.server.deliver(Received(subject=bell, data=b"", headers=message.headers))
        return stored

    async def last(self, stream: str, subject: str) -> Received | None:
        self._check()
        return self.server.stream(stream).last(subject)

    async def look(self, stream: str, subject: str) -> _Looking:
        return _Looking(await self.last(stream, subject))

    async def read(self, stream: str, subject: str, *, after: int = 0, limit: int = 1024) -> list[Received]:
        self._check()
        return self.server.stream(stream).read(subject, after, limit)

    async def purge(self, stream: str, subject: str, *, keep: int = 0) -> None:
        self._check()
        self.server.stream(stream).purge(subject, keep)

    async def delete(self, stream: str, sequence: int) -> None:
        self._check()
        if self.server.stream(stream).get(sequence) is None:
            raise NotFound(f"stream {stream} has no message {sequence}")
        self.server.stream(stream).remove(sequence)

    # inside

    def _check(self) -> None:
        if self._closed or not self.server.online:
            raise Unavailable("the message server cannot be reached")

    def _message(self, subject: str, data: bytes, headers: Headers | None) -> Received:
        self._check()
        check_size(data, headers, self.server.max_payload_bytes)
        return Received(subject=subject, data=data, headers=dict(headers or {}))

    async def _drop(self, owner: _Listener | _Responder) -> None:
        if isinstance(owner, _Listener):
            self.server.listeners.remove(owner)
            self._open.remove(owner.buffer)
        else:
            self.server.responders.remove(owner)
            self._open.remove(owner.service)


class _Pull:
    """A `PullConsumer` on a consumer of the server."""

    def __init__(self, transport: MemoryTransport, consumer: Consumer) -> None:
        self._transport = transport
        self._consumer = consumer

    async def fetch(self, *, limit: int, timeout: float) -> list[Delivery]:
        self._consumer.waiters += 1
        try:
            async with asyncio.timeout(timeout):
                while not (taken := self._take(limit)):
                    await self._consumer.stream.changed()
                return taken
        except TimeoutError:
            return self._take(limit)
        finally:
            self._consumer.waiters -= 1

    def _take(self, limit: int) -> list[Delivery]:
        if not self._transport.server.online:
            return []
        return list(self._consumer.take(limit))

    async def pending(self) -> int:
        return self._consumer.pending()

    async def close(self) -> None:
        return None
