"""The work item of an attempt: extended while it is worked on, and ended exactly once."""

from __future__ import annotations

from shared.protocol import subjects
from shared.transport.base import Delivery, Headers, Transport


class WorkItem:
    """One request in the queue. Of its deliveries the newest counts."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._ended = False

    @property
    def headers(self) -> Headers:
        return self._delivery.message.headers

    @property
    def subject(self) -> str:
        """Where it was enqueued."""
        return self._delivery.message.subject

    @property
    def deliveries(self) -> int:
        """How often the queue has delivered it."""
        return self._delivery.delivery_count

    def adopt(self, delivery: Delivery) -> None:
        """The queue delivered it again while it is worked on: that delivery is to be extended and ended."""
        self._delivery = delivery

    async def extend(self) -> None:
        """Restart its acknowledgement wait. Raises Unavailable."""
        await self._delivery.progress()

    async def acknowledge(self) -> None:
        """Done for ever: only after the journal holds a terminal. Raises Unavailable: it will be delivered again."""
        self._ended = True
        await self._delivery.ack()

    async def hand_back(self, *, delay_s: float) -> None:
        """To be delivered again; nothing when it is ended already. Raises Unavailable: its wait has to pass."""
        if not self._ended:
            self._ended = True
            await self._delivery.nak(delay_s=delay_s)

    async def bury(self, transport: Transport, fingerprint: str, *, name: str, reason: str) -> None:
        """Keep a copy for a person to look at, with the code of the reason; once for each `name`. Raises Unavailable or Overloaded."""
        await transport.append(
            subjects.dead(fingerprint),
            self._delivery.message.data,
            message_id=name,
            headers={**self.headers, subjects.DEAD_REASON: reason},
        )

    async def drop(self) -> None:
        """Never deliver it again, though no journal tells its end: it cannot be read. Raises Unavailable."""
        self._ended = True
        await self._delivery.term()
