"""What the tests of the transport's contract share: one server, and subjects of a test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from shared.protocol.subjects import ConsumerSpec, StreamSpec
from shared.transport.base import Delivery, PullConsumer, Transport

Opener = Callable[[], Awaitable[Transport]]
PATIENCE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class World:
    """One server, a prefix of subjects that is this test's own, and a first connection."""

    open: Opener
    prefix: str
    transport: Transport

    def stream(self, *, work_queue: bool = False, **changes: object) -> StreamSpec:
        spec = StreamSpec(
            name=f"T_{self.prefix}",
            subjects=(f"{self.prefix}.>",),
            work_queue=work_queue,
            max_bytes=1 << 20,
            max_age_s=3600,
            max_msg_bytes=1 << 16,
            max_msgs_per_subject=-1,
            duplicate_window_s=60,
        )
        return replace(spec, **changes)

    def consumer(self, **changes: object) -> ConsumerSpec:
        spec = ConsumerSpec(
            stream=f"T_{self.prefix}",
            durable="pull",
            filter_subject=f"{self.prefix}.*",
            ack_wait_s=30.0,
            max_ack_pending=64,
        )
        return replace(spec, **changes)

    def subject(self, token: str = "a") -> str:
        return f"{self.prefix}.{token}"


async def fetch(consumer: PullConsumer, count: int = 1) -> list[Delivery]:
    """Exactly `count` deliveries, within the test's patience."""
    found: list[Delivery] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            found.extend(await consumer.fetch(limit=count - len(found), timeout=1.0))
    return found


async def until_taken(transport: Transport, spec: ConsumerSpec, *, priority: int = 0) -> Delivery:
    """A message, within the test's patience."""
    async with asyncio.timeout(PATIENCE_S):
        while (taken := await transport.take(spec, priority=priority)) is None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    return taken
