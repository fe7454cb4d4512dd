"""Small stand-ins for what the queue gives."""

from __future__ import annotations

from shared.transport.base import Received


class TwinDelivery:
    """A delivery that knows no queue: for one work item that two workers hold at once."""

    def __init__(self, data: bytes) -> None:
        self.message = Received(subject="req.x.normal.0", data=data)
        self.delivery_count = 1
        self.ended = ""

    async def ack(self) -> None:
        self.ended = "ack"

    async def pass_over(self) -> None:
        self.ended = "ack"

    async def nak(self, *, delay_s: float = 0.0) -> None:
        self.ended = "nak"

    async def term(self) -> None:
        self.ended = "term"

    async def progress(self) -> None:
        return None
