"""A stream of the memory twin: fences, duplicates, limits, and consumers with acknowledgement waits.

stored --take--> pending --ack/term--> gone (from the stream too, in a work queue)
                   |  ^
         ack_wait, nak delay --> taken again with a higher count
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from shared.clock import Clock
from shared.errors import Conflict, FencedOut, Overloaded, PayloadTooLarge
from shared.protocol.subjects import ConsumerSpec, StreamSpec
from shared.transport.base import Received, Stored
from shared.transport.wire import matches, message_bytes, overlaps

_NS: Final = 1_000_000_000
_POLL_S: Final = 0.02  # how soon a waiting fetch notices that a clock, perhaps a manual one, has moved


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A stored message."""

    message: Received
    at_ns: int
    size: int


class MemoryStream:
    """One stream. Not thread-safe; all calls come from one event loop."""

    def __init__(self, spec: StreamSpec, clock: Clock) -> None:
        self.spec = spec
        self.clock = clock
        self.consumers: dict[str, Consumer] = {}
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._ids: OrderedDict[str, tuple[int, int]] = OrderedDict()  # message id -> (sequence, when in ns)
        self._bytes = 0
        self._last_sequence = 0
        self._event = asyncio.Event()

    def update(self, spec: StreamSpec) -> None:
        """Take over changed limits. Raises Conflict when the retention would change."""
        if spec.work_queue != self.spec.work_queue:
            raise Conflict(f"stream {spec.name}: retention cannot be changed")
        self.spec = spec

    def holds(self, subject: str) -> bool:
        """Whether `subject` belongs here."""
        return any(matches(pattern, subject) for pattern in self.spec.subjects)

    def append(self, message: Received, message_id: str | None, expected: int | None) -> Stored:
        """Store a message. Raises PayloadTooLarge, FencedOut or Overloaded, in the server's order of checks."""
        self._expire()
        size = message_bytes(message.data, message.headers)
        if size > self.spec.max_msg_bytes:
            raise PayloadTooLarge(f"{size} bytes are over the {self.spec.max_msg_bytes} of {self.spec.name}")
        if message_id is not None and message_id in self._ids:
            return Stored(sequence=self._ids[message_id][0], duplicate=True)
        if expected is not None:
            found = self.last(message.subject)
            if (found.sequence if found else 0) != expected:
                return self._repeated(message, expected)
        if self._bytes + size > self.spec.max_bytes:
            raise Overloaded(f"stream {self.spec.name} is full")
        return self._store(message, message_id, size)

    def _repeated(self, message: Received, expected: int) -> Stored:
        """The answer to an expectation that does not hold: the same append again is a duplicate, another is fenced."""
        after = self.read(message.subject, expected, 1)
        if after and after[0].data == message.data:
            return Stored(sequence=after[0].sequence, duplicate=True)
        raise FencedOut(f"{message.subject} has moved on from sequence {expected}")

    def _store(self, message: Received, message_id: str | None, size: int) -> Stored:
        self._last_sequence += 1
        sequence = self._last_sequence
        now = self.clock.wall_ns()
        self._kept[sequence] = _Kept(message=replace(message, sequence=sequence), at_ns=now, size=size)
        self._bytes += size
        if message_id is not None:
            self._ids[message_id] = (sequence, now)
        limit = self.spec.max_msgs_per_subject
        if limit > 0:
            same = [kept.message.sequence for kept in self._of(message.subject)]
            for old in same[:-limit]:
                self.remove(old)
        self._wake()
        return Stored(sequence=sequence, duplicate=False)

    def last(self, subject: str) -> Received | None:
        """The newest message of a subject."""
        self._expire()
        for kept in reversed(self._kept.values()):
            if kept.message.subject == subject:
                return kept.message
        return None

    def read(self, subject: str, after: int, limit: int) -> list[Received]:
        """Messages of a subject with sequence > `after`, ascending."""
        self._expire()
        found = [kept.message for kept in self._of(subject) if kept.message.sequence > after]
        return found[:limit]

    def purge(self, subject: str, keep: int) -> None:
        """Delete what is here of a subject (pattern), but for its newest `keep` messages."""
        held = [kept.message.sequence for kept in self._of(subject)]
        for sequence in held[: max(0, len(held) - keep)]:
            self.remove(sequence)

    def waiting(self, pattern: str) -> dict[str, int]:
        """Messages here by subject."""
        self._expire()
        return dict(Counter(kept.message.subject for kept in self._of(pattern)))

    def ensure_consumer(self, spec: ConsumerSpec) -> Consumer:
        """Create a consumer or give the one that is. Raises Conflict for another filter, or in a work queue for one
        that overlaps."""
        known = self.consumers.get(spec.durable)
        if known is not None:
            if known.spec.filter_subject != spec.filter_subject:
                raise Conflict(f"consumer {spec.durable}: filter_subject cannot be changed")
            known.spec = spec
            return known
        if self.spec.work_queue and any(
            overlaps(other.spec.filter_subject, spec.filter_subject) for other in self.consumers.values()
        ):
            raise Conflict(f"consumer {spec.durable}: its filter overlaps another's in a work queue")
        self.consumers[spec.durable] = Consumer(self, spec)
        return self.consumers[spec.durable]

    def get(self, sequence: int) -> Received | None:
        """The message with a sequence, if it is still here."""
        kept = self._kept.get(sequence)
        return kept.message if kept else None

    def after(self, sequence: int) -> Iterator[Received]:
        """All messages with a greater sequence, ascending."""
        self._expire()
        return iter([kept.message for number, kept in self._kept.items() if number > sequence])

    def remove(self, sequence: int) -> None:
        """Delete one message."""
        kept = self._kept.pop(sequence, None)
        if kept is not None:
            self._bytes -= kept.size

    async def changed(self) -> None:
        """Until something was stored or handed back, or a moment has passed in which the clock may have moved."""
        try:
            async with asyncio.timeout(_POLL_S):
                self._event.clear()
                await self._event.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        self._event.set()

    def _of(self, pattern: str) -> list[_Kept]:
        return [kept for kept in self._kept.values() if matches(pattern, kept.message.subject)]

    def _expire(self) -> None:
        """Forget messages and message ids that are too old. Both are ordered by time."""
        now = self.clock.wall_ns()
        while self._kept:
            sequence, kept = next(iter(self._kept.items()))
            if now - kept.at_ns < self.spec.max_age_s * _NS:
                break
            self.remove(sequence)
        while self._ids:
            message_id, (_, at_ns) = next(iter(self._ids.items()))
            if now - at_ns < self.spec.duplicate_window_s * _NS:
                break
            del self._ids[message_id]


@dataclass
class _Pending:
    """A message that was delivered and not acknowledged."""

    count: int
    due_ns: int  # when it may be taken again


class Consumer:
    """A durable consumer of a stream."""

    def __init__(self, stream: MemoryStream, spec: ConsumerSpec) -> None:
        self.stream = stream
        self.spec = spec
        self.waiters = 0  # pulls that wait, all of them with priority 0
        self._cursor = 0  # every message up to here was taken once
        self._pending: dict[int, _Pending] = {}

    def take(self, limit: int) -> list[MemoryDelivery]:
        """Up to `limit` deliveries: those whose wait is over first, then new ones."""
        now = self.stream.clock.monotonic_ns()
        taken: list[MemoryDelivery] = []
        for sequence in sorted(self._pending):
            message = self.stream.get(sequence)
            if message is None:
                del self._pending[sequence]
            elif self._pending[sequence].due_ns <= now and len(taken) < limit:
                taken.append(self._deliver(message, self._pending[sequence].count + 1))
        for message in self.stream.after(self._cursor):
            if len(taken) >= limit or len(self._pending) >= self.spec.max_ack_pending:
                break
            self._cursor = message.sequence
            if matches(self.spec.filter_subject, message.subject):
                taken.append(self._deliver(message, 1))
        return taken

    def _deliver(self, message: Received, count: int) -> MemoryDelivery:
        self._pending[message.sequence] = _Pending(count, 0)
        self.postpone(message.sequence, self.spec.ack_wait_s)
        return MemoryDelivery(self, message, count)

    def pending(self) -> int:
        """Messages that were never taken."""
        return sum(
            matches(self.spec.filter_subject, message.subject) for message in self.stream.after(self._cursor)
        )

    def postpone(self, sequence: int, seconds: float) -> None:
        """Let a pending message wait `seconds` from now. As with NATS, any holder of a delivery may say so."""
        pending = self._pending.get(sequence)
        if pending is not None:
            pending.due_ns = self.stream.clock.monotonic_ns() + int(seconds * _NS)

    def done(self, sequence: int) -> None:
        """Never deliver again."""
        if self._pending.pop(sequence, None) is not None and self.stream.spec.work_queue:
            self.stream.remove(sequence)


class MemoryDelivery:
    """A `Delivery`."""

    def __init__(self, consumer: Consumer, message: Received, count: int) -> None:
        self._consumer = consumer
        self._message = message
        self._count = count
        self._ended = False

    @property
    def message(self) -> Received:
        return self._message

    @property
    def delivery_count(self) -> int:
        return self._count

    async def ack(self) -> None:
        self._end()
        self._consumer.done(self._message.sequence)

    async def pass_over(self) -> None:
        await self.ack()

    async def nak(self, *, delay_s: float = 0.0) -> None:
        self._end()
        self._consumer.postpone(self._message.sequence, delay_s)

    async def term(self) -> None:
        self._end()
        self._consumer.done(self._message.sequence)

    async def progress(self) -> None:
        self._consumer.postpone(self._message.sequence, self._consumer.spec.ack_wait_s)

    def _end(self) -> None:
        if self._ended:
            raise RuntimeError("this delivery was already ended")
        self._ended = True
