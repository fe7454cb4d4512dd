"""Journals of requests that ended: kept for a grace time, then cut to their terminal.

The stream refuses when it is full, so what nobody reads any more must go. The terminal stays, by the stream's own age: a
work item that is delivered again finds that the request has ended. Cancellations of ended requests go altogether, and
prompts that lie in chunks.

What a broker still remembered when it died is not cut; those journals go by age.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from shared.clock import Clock
from shared.errors import BurstlineError
from shared.outage import Outage
from shared.protocol import subjects
from shared.protocol.messages import Terminal
from shared.transport import bodies
from shared.transport.base import Transport

TICK_S: Final = 2.0
MOST: Final = 200_000
"""Requests remembered; of more the oldest go by age."""

_log = logging.getLogger(__name__)


class Journals:
    """Belongs to the event loop: whoever settles a terminal tells it, `run` cuts."""

    def __init__(
        self, transport: Transport, clock: Clock, registry: CollectorRegistry, *, grace_s: float
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._grace_ns = int(grace_s * 1e9)
        self._ended: deque[tuple[int, str, bool, bool]] = deque(maxlen=MOST)
        """Due, request, was it cancelled, may its prompt lie in chunks."""
        self._cut = Counter(
            "burstline_broker_journals_cut",
            "Journals cut to their terminal after the grace",
            registry=registry,
        )

    def ended(self, terminal: Terminal) -> None:
        """The journal of a request has its terminal."""
        due = self._clock.monotonic_ns() + self._grace_ns
        body = terminal.failure is None and bodies.may_be_checked(terminal.prompt_tokens)
        self._ended.append((due, terminal.request_id, terminal.cancel_reason is not None, body))

    async def run(self) -> None:
        """Until cancelled; an outage of the queue is waited out."""
        outage = Outage(_log, "cuts of journals")
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if await self.cut():
                    outage.worked()
            except BurstlineError as error:
                outage.failed(error.message)

    async def cut(self) -> int:
        """Cut what is due; returns how many. Raises Unavailable; what was not cut stays due."""
        count = 0
        while self._ended and self._ended[0][0] <= self._clock.monotonic_ns():
            entry = self._ended[0]
            _, request, cancelled, body = entry
            await self._transport.purge(subjects.JOURNAL.name, subjects.tokens(request), keep=1)
            if cancelled:
                await self._transport.purge(subjects.CANCELS.name, subjects.cancel(request))
            if body:
                await bodies.forget(self._transport, request)
            if self._ended and self._ended[0] is entry:  # a full memory may have dropped it meanwhile
                self._ended.popleft()
            count += 1
            self._cut.inc()
        return count
