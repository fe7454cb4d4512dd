"""What the services need of a message system, in our words.

Payloads are bytes (protocol/codec.py makes them), headers carry W3C trace context. Errors are ours (shared.errors):
`Unavailable` when the server cannot be reached or does not answer in time, `FencedOut` when an expected sequence does
not hold, `Overloaded` when a stream refuses for lack of room, `PayloadTooLarge` before anything is sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shared.protocol.subjects import ConsumerSpec, StreamSpec

Headers = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Received:
    """A message as a subscriber or a stream reader gets it. `sequence` is 0 for core messages."""

    subject: str
    data: bytes
    headers: Headers = field(default_factory=dict)
    sequence: int = 0


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A stream's answer to a publish."""

    sequence: int
    duplicate: bool


class Delivery(Protocol):
    """One delivery of a work item. Exactly one of ack / nak / term ends it; until then `progress` extends it."""

    @property
    def message(self) -> Received: ...

    @property
    def delivery_count(self) -> int:
        """1 for the first delivery."""

    async def ack(self) -> None:
        """Done; waits until the server knows it."""

    async def pass_over(self) -> None:
        """Done, and nothing hangs on it: not waited for, and if the word is lost it is delivered again."""

    async def nak(self, *, delay_s: float = 0.0) -> None:
        """Hand back, to be delivered again after `delay_s`."""

    async def term(self) -> None:
        """Never deliver again."""

    async def progress(self) -> None:
        """Restart the ack_wait clock."""


class Subscription(Protocol):
    """A live core subscription. Iteration ends when it is closed."""

    def __aiter__(self) -> AsyncIterator[Received]: ...

    async def next(self, timeout: float) -> Received | None:
        """The next message, or None after `timeout` seconds. Raises Unavailable once closed."""

    @property
    def dropped(self) -> int:
        """Messages lost here because the reader was slow, plus one for every time that the connection was away (what was
        published meanwhile was not heard). The journal still has what is journalled."""

    async def close(self) -> None:
        """Unsubscribe. Idempotent."""


class PullConsumer(Protocol):
    """A durable pull consumer."""

    async def fetch(self, *, limit: int, timeout: float) -> list[Delivery]:
        """Up to `limit` deliveries; [] after `timeout` seconds. Survives a server restart (recreates itself)."""

    async def pending(self) -> int:
        """Messages that wait for delivery."""

    async def close(self) -> None:
        """Pull no more here, and hand back what nobody fetched; the durable stays. Idempotent. `ensure_consumer` gives another
        one."""


class Looking(Protocol):
    """A look at the newest message of a subject that is under way."""

    async def found(self) -> Received | None:
        """What was there, at some moment since the look began. Once. Raises Unavailable."""

    def drop(self) -> None:
        """Nobody waits for it any more. Idempotent."""


Handler = Callable[[Received], Awaitable[bytes]]


class Transport(Protocol):
    """A connection."""

    async def close(self) -> None:
        """Drain what was published, close. Idempotent."""

    async def ready(self) -> bool:
        """Whether a round trip to the server succeeds now."""

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit for one message, headers included."""

    # core
    async def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        """At most once, to whoever listens."""

    async def subscribe(self, subject: str, *, settled: bool = True) -> Subscription:
        """When this returns, the server has the subscription (two flushes: one alone is no barrier in nats-py). Unless
        `settled`: then it has it before whatever this connection sends later, which is enough, and costs no round
        trip, for who listens to what only comes of that.
        Buffers are bounded: a slow reader loses messages and sees it in `dropped`."""

    async def request(
        self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None
    ) -> bytes:
        """Ask and wait for one answer. Raises Unavailable when nobody listens or nobody answers in time."""

    async def serve(self, subject: str, queue: str, handler: Handler, *, concurrency: int) -> Subscription:
        """Answer requests on `subject` as one of the group `queue`, at most `concurrency` at a time."""

    # streams
    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create it, or make it as the spec says. Idempotent, safe from several processes at once. Raises Conflict
        naming the field when the one that is cannot be changed so, and Unavailable (`nats_unsuitable`) at the first
        call when the server is one that must not be used."""

    async def ensure_consumer(self, spec: ConsumerSpec) -> PullConsumer:
        """Create or attach to a durable pull consumer. Idempotent."""

    async def take(self, spec: ConsumerSpec, *, priority: int = 0) -> Delivery | None:
        """One message that a durable consumer has now, or None; the consumer is made if it is not there. In a group
        (`spec.group`) a pull that waits with a lower priority number goes first. Raises Unavailable."""

    async def drop_consumer(self, stream: str, durable: str) -> None:
        """Delete a durable consumer; what it had not delivered stays in the stream. Idempotent."""

    async def waiting(self, stream: str, pattern: str) -> dict[str, int]:
        """How many messages a stream holds of each subject under a pattern, delivered or not; those with none are left
        out."""

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
        """Publish into the stream that holds `subject`, and wait until it is stored.

        With `expected_last_subject_sequence` the server refuses unless the subject's last message has that sequence
        (0 = none yet): FencedOut. A lost answer is never guessed: the same bytes with the same expectation, appended
        again, are found in the stream and answered as a duplicate. Unavailable = the outcome is unknown; append again.
        Overloaded, PayloadTooLarge, FencedOut = nothing was stored (plain subscribers may still have seen it).
        """

    async def last(self, stream: str, subject: str) -> Received | None:
        """The newest stored message of a subject."""

    async def look(self, stream: str, subject: str) -> Looking:
        """`last` in two: it goes with what is sent next, and what it finds is waited for later. Raises Unavailable."""

    async def read(self, stream: str, subject: str, *, after: int = 0, limit: int = 1024) -> list[Received]:
        """Stored messages of one subject with sequence > `after`, ascending, at most `limit`."""

    async def purge(self, stream: str, subject: str, *, keep: int = 0) -> None:
        """Delete what a stream holds of one subject, but for its newest `keep` messages."""

    async def delete(self, stream: str, sequence: int) -> None:
        """Delete one stored message. Raises NotFound."""
