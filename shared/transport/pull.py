"""A durable pull consumer over a `Wire`.

One inbox a consumer lives as long as the connection and survives reconnects. A fetch first takes what the server has
(no wait), then leaves one lingering request for one message: nothing is hoarded here that another worker could do.
What comes after its fetch has gone (time-out, cancel) is kept for the next one. A request that went to a server that
restarted is orphaned; it is sent again at the reconnect and when the server's idle heartbeats stop (FR-102).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from shared.clock import SYSTEM, Clock
from shared.errors import BurstlineError, Unavailable
from shared.protocol.subjects import ConsumerSpec
from shared.transport import jetstream
from shared.transport.base import Delivery, Received
from shared.transport.fields import clean
from shared.transport.wire import Closer, Raw, Wire

_log = logging.getLogger(__name__)

_NS: Final = 1_000_000_000
_HEARTBEAT_S: Final = 2.0
_PROBE_S: Final = 2.0  # how long a request that never waits may take to be answered
_BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0)
_ACK_S: Final = 5.0


class Pull:
    """A `PullConsumer`. `recreate` makes the stream and the consumer anew when the server has lost them; `on_close` is called when
    it is closed."""

    def __init__(
        self,
        wire: Wire,
        spec: ConsumerSpec,
        recreate: Callable[[], Awaitable[None]],
        clock: Clock = SYSTEM,
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._wire = wire
        self._spec = spec
        self._recreate = recreate
        self._on_close = on_close
        self._clock = clock
        self._prefix = wire.inbox()
        self._ready: deque[Raw] = deque()
        self._statuses: deque[Raw] = deque()
        self._changed = asyncio.Event()
        self._one_fetch = asyncio.Lock()
        self._listening: Closer | None = None
        self._asked = 0
        self._reconnected = False

    async def start(self) -> None:
        """Listen on the inbox. Called once, by `ensure_consumer`."""
        self._listening = await self._wire.listen(f"{self._prefix}.*", self._receive)

    async def close(self) -> None:
        self._on_close()
        if self._listening is not None:
            listening, self._listening = self._listening, None
            await listening.close()
        while self._ready:
            await self._wire.send(self._ready.popleft().reply, b"-NAK")

    def wake(self) -> None:
        """The connection is a new one: whatever was asked before is forgotten there."""
        self._reconnected = True
        self._changed.set()

    async def pending(self) -> int:
        operation = f"CONSUMER.INFO.{self._spec.stream}.{self._spec.durable}"
        return int((await jetstream.call(self._wire, operation, {})).get("num_pending", 0))

    async def fetch(self, *, limit: int, timeout: float) -> list[Delivery]:
        deadline_ns = self._clock.monotonic_ns() + int(timeout * _NS)
        async with self._one_fetch:
            failures = 0
            while not self._ready and (left := self._left(deadline_ns)) > 0:
                try:
                    if not await self._wire.connected(left):
                        break
                    await self._round(limit, deadline_ns)
                    failures = 0
                except BurstlineError as error:
                    _log.debug("fetch on %s: %s", self._spec.durable, error)
                    await self._recover(failures, deadline_ns)
                    failures += 1
            return [
                WireDelivery(self._wire, self._ready.popleft()) for _ in range(min(limit, len(self._ready)))
            ]

    # inside

    def _left(self, deadline_ns: int) -> float:
        return (deadline_ns - self._clock.monotonic_ns()) / _NS

    async def _round(self, limit: int, deadline_ns: int) -> None:
        """One request for what is there, then, if nothing was, one that lingers. Raises Unavailable on a refusal."""
        if limit > 1:
            token = await self._ask({"batch": limit, "no_wait": True})
            await self._await(token, limit, min(_PROBE_S, self._left(deadline_ns)))
            if self._ready:
                return
        left = self._left(deadline_ns)
        if left <= 0:
            return
        request: dict[str, Any] = {"batch": 1, "expires": int(left * _NS)}
        patience = left
        if left > 2 * _HEARTBEAT_S:
            request["idle_heartbeat"] = int(_HEARTBEAT_S * _NS)
            patience = 3 * _HEARTBEAT_S
        await self._await(await self._ask(request), 1, patience, deadline_ns=deadline_ns)

    async def _ask(self, request: dict[str, Any]) -> str:
        self._asked += 1
        self._reconnected = False
        self._statuses.clear()
        token = f"{self._prefix}.{self._asked}"
        await send_pull(self._wire, self._spec, request, token, priority=0)
        return token

    async def _await(
        self, token: str, limit: int, patience: float, *, deadline_ns: int | None = None
    ) -> None:
        """Until `limit` messages are here, the request has ended, or nothing was heard for `patience` seconds."""
        while len(self._ready) < limit and not self._reconnected:
            if deadline_ns is not None and self._left(deadline_ns) <= 0:
                return
            self._changed.clear()
            if not self._statuses:
                try:
                    async with asyncio.timeout(patience):
                        await self._changed.wait()
                except TimeoutError:
                    return
            while self._statuses:
                if self._ended(self._statuses.popleft(), token):
                    return

    def _ended(self, status: Raw, token: str) -> bool:
        """Whether a status ends the request `token`. Raises Unavailable for those that say that something is wrong."""
        if status.subject != token or status.status == "100":  # another request's, or a heartbeat
            return False
        if status.status in ("404", "408"):  # no messages, expired
            return True
        raise Unavailable(f"{status.status} {status.headers.get('Description', '')}".rstrip())

    async def _recover(self, failures: int, deadline_ns: int) -> None:
        """After a refusal: wait a little, then make sure that the consumer is there."""
        await asyncio.sleep(max(0.0, min(_BACKOFF_S[min(failures, 3)], self._left(deadline_ns))))
        if self._left(deadline_ns) <= 0:
            return
        try:
            await self._recreate()
        except Unavailable as error:
            _log.debug("consumer %s cannot be made yet: %s", self._spec.durable, error)

    def _receive(self, raw: Raw) -> None:
        if raw.status:
            self._statuses.append(raw)
        else:
            self._ready.append(raw)
        self._changed.set()


async def send_pull(
    wire: Wire, spec: ConsumerSpec, request: dict[str, Any], reply: str, *, priority: int
) -> None:
    """Ask a consumer for messages."""
    if spec.group is not None:
        request = {**request, "group": spec.group, "priority": priority}
    subject = f"$JS.API.CONSUMER.MSG.NEXT.{spec.stream}.{spec.durable}"
    await wire.send(subject, msgspec.json.encode(request), reply=reply)


def consumer_of(reply: str) -> str:
    """`stream.durable` that a message is of, by its reply subject: $JS.ACK.[domain.account.]stream.consumer.count..."""
    tokens = reply.split(".")
    return ".".join(tokens[2:4] if len(tokens) < 11 else tokens[4:6])


class WireDelivery:
    """A `Delivery`. The reply subject says which: $JS.ACK.[domain.account.]stream.consumer.count.sequence..."""

    def __init__(self, wire: Wire, raw: Raw) -> None:
        self._wire = wire
        self._reply = raw.reply
        self._ended = False
        tokens = raw.reply.split(".")
        count, sequence = tokens[4:6] if len(tokens) < 11 else tokens[6:8]
        self._count = int(count)
        self._message = Received(
            subject=raw.subject, data=raw.data, headers=clean(raw.headers), sequence=int(sequence)
        )

    @property
    def message(self) -> Received:
        return self._message

    @property
    def delivery_count(self) -> int:
        return self._count

    async def ack(self) -> None:
        await self._end(b"+ACK")

    async def pass_over(self) -> None:
        self._check()
        await self._wire.send(self._reply, b"+ACK")
        self._ended = True

    async def nak(self, *, delay_s: float = 0.0) -> None:
        detail = f' {{"delay": {int(delay_s * _NS)}}}' if delay_s > 0 else ""
        await self._end(b"-NAK" + detail.encode())

    async def term(self) -> None:
        await self._end(b"+TERM")

    async def progress(self) -> None:
        await self._wire.send(self._reply, b"+WPI")

    async def _end(self, verdict: bytes) -> None:
        """Say the verdict and wait until the server knows it. On Unavailable it may be said again."""
        self._check()
        await self._wire.ask(self._reply, verdict, timeout=_ACK_S)
        self._ended = True

    def _check(self) -> None:
        if self._ended:
            raise RuntimeError("this delivery was already ended")
