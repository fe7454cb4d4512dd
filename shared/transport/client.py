"""The transport over a `Wire`: core messages, request/reply, and the streams of `jetstream.py` and `pull.py`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from shared.errors import NotFound, Unavailable
from shared.protocol.subjects import STREAMS, ConsumerSpec, StreamSpec
from shared.transport import jetstream, specs, suitability
from shared.transport.base import Delivery, Handler, Headers, PullConsumer, Received, Stored, Subscription
from shared.transport.buffer import Buffer
from shared.transport.fields import clean
from shared.transport.pull import Pull
from shared.transport.service import Service
from shared.transport.take import Taker
from shared.transport.wire import Closer, Raw, Wire, check_size, matches

_log = logging.getLogger(__name__)

FLUSH_S: Final = 5.0
_FAILED: Final = "Burstline-Failed"  # header of an answer that says that the handler failed


class WireTransport:
    """A `Transport`. Owns the wire: closing it closes the wire and everything that was opened here."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._open: set[Buffer | Service] = set()
        self._pulls: dict[tuple[str, str], tuple[ConsumerSpec, Pull]] = {}
        self._taker = Taker(wire, self._recreate)
        self._streams: dict[str, StreamSpec] = {spec.name: spec for spec in STREAMS}
        self._ensured: set[str] = set()
        self._checking = asyncio.Lock()
        self._suitable = False
        self._closing = False
        self._ending: list[asyncio.Task[None]] = []
        wire.on_reconnect(self._reconnected)
        wire.on_lost(self._lost)

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        for subscription in list(self._open):
            await subscription.close()
        if await self._wire.connected(0):
            try:
                for _, pull in list(self._pulls.values()):
                    await pull.close()
                await self._taker.close()
                await self._wire.barrier(FLUSH_S)
            except Unavailable:
                _log.warning("the connection was closed before the server had everything")
        await self._wire.close()

    async def ready(self) -> bool:
        if self._closing or not await self._wire.connected(0):
            return False
        try:
            await self._wire.barrier(2.0)
        except Unavailable:
            return False
        return True

    @property
    def max_payload_bytes(self) -> int:
        return self._wire.max_payload_bytes

    # core

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        check_size(data, headers, self._wire.max_payload_bytes)
        await self._wire.send(subject, data, headers=headers)

    async def subscribe(self, subject: str, *, settled: bool = True) -> Subscription:
        buffer = Buffer(lambda: self._end(buffer, listening))

        def receive(raw: Raw) -> None:
            buffer.offer(_received(raw))

        listening = await self._wire.listen(subject, receive)
        if settled:
            await self._settle(listening)
        self._open.add(buffer)
        return buffer

    async def request(
        self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None
    ) -> bytes:
        check_size(data, headers, self._wire.max_payload_bytes)
        answer = await self._wire.ask(subject, data, timeout=timeout, headers=headers)
        if _FAILED in answer.headers:
            raise Unavailable(f"the call on {subject} failed at the other side")
        return answer.data

    async def serve(self, subject: str, queue: str, handler: Handler, *, concurrency: int) -> Subscription:
        service = Service(handler, concurrency, lambda: self._end(service, listening))

        def receive(raw: Raw) -> None:
            service.offer(_received(raw), lambda result: self._reply(raw.reply, result))

        listening = await self._wire.listen(subject, receive, queue=queue)
        await self._settle(listening)
        self._open.add(service)
        return service

    # streams

    async def ensure_stream(self, spec: StreamSpec) -> None:
        async with self._checking:
            if not self._suitable:
                await suitability.check(self._wire)
                self._suitable = True
        await specs.ensure_stream(self._wire, spec)
        self._streams[spec.name] = spec
        self._ensured.add(spec.name)

    async def ensure_consumer(self, spec: ConsumerSpec) -> PullConsumer:
        await specs.ensure_consumer(self._wire, spec)
        place = (spec.stream, spec.durable)
        if place not in self._pulls or self._pulls[place][0] != spec:
            pull = Pull(
                self._wire,
                spec,
                lambda: self._recreate(spec),
                on_close=lambda: self._forget_pull(place, pull),
            )
            await pull.start()
            replaced = self._pulls.get(place)
            self._pulls[place] = (spec, pull)
            if replaced is not None:
                await replaced[1].close()
        return self._pulls[place][1]

    def _forget_pull(self, place: tuple[str, str], pull: Pull) -> None:
        if place in self._pulls and self._pulls[place][1] is pull:
            del self._pulls[place]

    async def take(self, spec: ConsumerSpec, *, priority: int = 0) -> Delivery | None:
        return await self._taker.take(spec, priority=priority)

    async def drop_consumer(self, stream: str, durable: str) -> None:
        with suppress(NotFound):
            await jetstream.call(self._wire, f"CONSUMER.DELETE.{stream}.{durable}", {})

    async def waiting(self, stream: str, pattern: str) -> dict[str, int]:
        return await jetstream.waiting(self._wire, stream, pattern)

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
        return await jetstream.append(
            self._wire,
            lambda: self._stream_of(subject),
            subject,
            data,
            message_id=message_id,
            expected=expected_last_subject_sequence,
            headers=headers,
            timeout=timeout,
        )

    async def last(self, stream: str, subject: str) -> Received | None:
        return await jetstream.last(self._wire, stream, subject)

    async def look(self, stream: str, subject: str) -> jetstream.Looking:
        return await jetstream.look(self._wire, stream, subject, soon=True)

    async def read(self, stream: str, subject: str, *, after: int = 0, limit: int = 1024) -> list[Received]:
        return await jetstream.read(self._wire, stream, subject, after=after, limit=limit)

    async def purge(self, stream: str, subject: str, *, keep: int = 0) -> None:
        body = {"filter": subject, "keep": keep} if keep else {"filter": subject}
        await jetstream.call(self._wire, f"STREAM.PURGE.{stream}", body)

    async def delete(self, stream: str, sequence: int) -> None:
        await jetstream.call(self._wire, f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})

    # inside

    def _stream_of(self, subject: str) -> str | None:
        for spec in self._streams.values():
            if any(matches(pattern, subject) for pattern in spec.subjects):
                return spec.name
        return None

    async def _settle(self, listening: Closer) -> None:
        """Wait until the server has a subscription; end it when that cannot be known."""
        try:
            await self._wire.barrier(FLUSH_S)
        except BaseException:
            await listening.close()
            raise

    async def _end(self, subscription: Buffer | Service, listening: Closer) -> None:
        self._open.discard(subscription)
        await listening.close()

    async def _reply(self, subject: str, result: bytes | None) -> None:
        """Answer a request; an answer over the payload limit is told as a failure."""
        if not subject:
            return
        if result is not None and len(result) > self._wire.max_payload_bytes:
            _log.error("an answer of %d bytes is over the payload limit", len(result))
            result = None
        await self._wire.send(subject, result or b"", headers={_FAILED: "1"} if result is None else None)

    async def _recreate(self, spec: ConsumerSpec) -> None:
        """Make a consumer anew, and its stream too when it was us who made sure of it."""
        if spec.stream in self._ensured:
            await specs.ensure_stream(self._wire, self._streams[spec.stream])
        await specs.ensure_consumer(self._wire, spec)

    def _reconnected(self) -> None:
        """Tell readers that they may have missed something, and consumers that the server forgot their requests."""
        for subscription in self._open:
            subscription.lost(1)
        for _, pull in self._pulls.values():
            pull.wake()

    def _lost(self) -> None:
        """The wire has ended for good: readers must not wait for ever."""
        if not self._closing:
            self._ending = [asyncio.create_task(subscription.close()) for subscription in self._open]


def _received(raw: Raw) -> Received:
    """A core message."""
    return Received(subject=raw.subject, data=raw.data, headers=clean(raw.headers))
