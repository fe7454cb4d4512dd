"""Taking one message from any of many durable consumers, without waiting for one to come.

One inbox for all of them, and one request at a time to each: a status names the request, a message the consumer that it is
of, so none waits while another does not answer. What comes after its request was given up is kept for the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final
from weakref import WeakValueDictionary

from shared.errors import Unavailable
from shared.protocol.subjects import ConsumerSpec
from shared.transport.base import Delivery
from shared.transport.pull import WireDelivery, consumer_of, send_pull
from shared.transport.wire import Closer, NobodyListens, Raw, Unanswered, Wire

_ANSWER_S: Final = 2.0
_GONE: Final = ("409", "503")  # the consumer was deleted; there is none


class Taker:
    """Of one connection. `make` makes a consumer, and its stream, when the server has none."""

    def __init__(self, wire: Wire, make: Callable[[ConsumerSpec], Awaitable[None]]) -> None:
        self._wire = wire
        self._make = make
        self._prefix = wire.inbox()
        self._late: deque[Raw] = deque()
        self._asked: dict[str, asyncio.Future[Raw]] = {}  # by the inbox of the request
        self._waiting: dict[str, asyncio.Future[Raw]] = {}  # by consumer
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by consumer: one asks
        self._opening = asyncio.Lock()
        self._listening: Closer | None = None
        self._count = 0

    async def take(self, spec: ConsumerSpec, *, priority: int) -> Delivery | None:
        """A message, or None when there is none now. Raises Unavailable."""
        if self._listening is None:
            async with self._opening:
                if self._listening is None:
                    self._listening = await self._wire.listen(f"{self._prefix}.*", self._receive)
        async with self._turns.setdefault(_place(spec), asyncio.Lock()):
            try:
                raw = await self._ask(spec, priority)
            except NobodyListens:
                await self._make(spec)
                raw = await self._ask(spec, priority)
            return None if raw is None else WireDelivery(self._wire, raw)

    async def close(self) -> None:
        """Stop listening and hand back what nobody took."""
        if self._listening is not None:
            await self._listening.close()
        while self._late:
            await self._wire.send(self._late.popleft().reply, b"-NAK")

    async def _ask(self, spec: ConsumerSpec, priority: int) -> Raw | None:
        if self._late:
            return self._late.popleft()
        self._count += 1
        token, place = f"{self._prefix}.{self._count}", _place(spec)
        answer: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
        self._asked[token] = self._waiting[place] = answer
        try:
            await send_pull(self._wire, spec, {"batch": 1, "no_wait": True}, token, priority=priority)
            async with asyncio.timeout(_ANSWER_S):
                return _message(await answer)
        except TimeoutError:
            self._keep(answer)
            raise Unanswered(f"a pull on {spec.durable} was not answered within {_ANSWER_S:g} s") from None
        except asyncio.CancelledError:
            self._keep(answer)
            raise
        finally:
            del self._asked[token], self._waiting[place]

    def _keep(self, answer: asyncio.Future[Raw]) -> None:
        """Who waited is gone: a message that came in the same moment is the next one's."""
        if answer.done() and not answer.cancelled() and not answer.result().status:
            self._late.append(answer.result())

    def _receive(self, raw: Raw) -> None:
        answer = self._asked.get(raw.subject) if raw.status else self._waiting.get(consumer_of(raw.reply))
        if answer is not None and not answer.done():
            answer.set_result(raw)
        elif not raw.status:
            self._late.append(raw)


def _place(spec: ConsumerSpec) -> str:
    """As `consumer_of` says it."""
    return f"{spec.stream}.{spec.durable}"


def _message(raw: Raw) -> Raw | None:
    """The message that an answer is; null where the server said that there is none. Raises NobodyListens without the
    consumer, else Unavailable."""
    if not raw.status:
        return raw
    if raw.status in ("404", "408"):
        return None
    text = f"{raw.status} {raw.headers.get('Description', '')}".rstrip()
    raise (NobodyListens if raw.status in _GONE else Unavailable)(text)
