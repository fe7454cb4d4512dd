"""What the way of a request cannot take less than: the same hops without gateway and worker.

    bare        a request and its reply between two processes, with nats-py as it comes: the yardstick, which nothing that is
                done here makes faster
    ours        the same over our own transport
    delivery    an append to a work queue until a long poll of another connection has it
    append      an append with an expected sequence until the server says that it is stored: a claim
    live        an append until a plain subscriber of another connection has it: a frame

Both ends of the last three are in one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final, Self

from nats.aio.client import Client
from nats.aio.msg import Msg

from services.bench.figures import quantiles
from shared.clock import SYSTEM
from shared.protocol.subjects import ConsumerSpec, StreamSpec
from shared.transport.base import PullConsumer, Subscription, Transport
from shared.transport.nats import connect

BARE: Final = "bench.bare"
OURS: Final = "bench.ours"
WAIT_S: Final = 10.0
_PAYLOAD: Final = b"x" * 64
_QUEUE: Final = StreamSpec(
    name="BENCH_QUEUE",
    subjects=("bench.queue.>",),
    work_queue=True,
    max_bytes=8 << 20,
    max_age_s=3600,
    max_msg_bytes=1 << 16,
    max_msgs_per_subject=-1,
    duplicate_window_s=60,
)
_JOURNAL: Final = StreamSpec(
    name="BENCH_JOURNAL",
    subjects=("bench.journal.*",),
    work_queue=False,
    max_bytes=8 << 20,
    max_age_s=3600,
    max_msg_bytes=1 << 16,
    max_msgs_per_subject=-1,
    duplicate_window_s=60,
)
_WORK: Final = ConsumerSpec(
    stream=_QUEUE.name, durable="work", filter_subject="bench.queue.a", ack_wait_s=30.0, max_ack_pending=64
)
_CLAIMS: Final = "bench.journal.claims"
_FRAMES: Final = "bench.journal.frames"


async def plain(url: str, name: str) -> Client:
    """nats-py as it comes."""
    client = Client()
    await client.connect(url, name=name)
    return client


async def echo(client: Client) -> None:
    """Answer the yardstick's requests, at the other process."""

    async def answer(message: Msg) -> None:
        await message.respond(message.data)

    await client.subscribe(BARE, cb=answer)


class Floor:
    """Milliseconds of each hop; `round` adds one of each, `clear` forgets them."""

    def __init__(self) -> None:
        self._ms: dict[str, list[float]] = {
            name: [] for name in ("bare", "ours", "delivery", "append", "live")
        }
        self._stack = AsyncExitStack()
        self._sequences = {_CLAIMS: 0, _FRAMES: 0}
        self._bare: Client
        self._near: Transport
        self._work: PullConsumer
        self._frames: Subscription

    @classmethod
    async def open(cls, url: str) -> Self:
        """Connect, and make the streams."""
        floor = cls()
        floor._bare = await plain(url, "bench-bare")
        floor._stack.push_async_callback(floor._bare.close)
        floor._near = await connect(url, name="bench-near")
        floor._stack.push_async_callback(floor._near.close)
        far = await connect(url, name="bench-far")
        floor._stack.push_async_callback(far.close)
        for stream in (_QUEUE, _JOURNAL):
            await floor._near.ensure_stream(stream)
        floor._work = await far.ensure_consumer(_WORK)
        floor._frames = await far.subscribe(_FRAMES)
        return floor

    async def close(self) -> None:
        """Close the connections."""
        await self._stack.aclose()

    async def round(self) -> None:
        """One of each hop."""
        await self._time("bare", lambda: self._bare.request(BARE, _PAYLOAD, timeout=WAIT_S))
        await self._time("ours", lambda: self._near.request(OURS, _PAYLOAD, timeout=WAIT_S))
        await self._time("append", lambda: self._append(_CLAIMS))
        await self._delivery()
        await self._live()

    def clear(self) -> None:
        """The warm-up is over."""
        for values in self._ms.values():
            values.clear()

    def figures(self) -> dict[str, dict[str, float]]:
        """Quantiles of each."""
        return {name: quantiles(values) for name, values in self._ms.items()}

    async def _time(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        began = SYSTEM.monotonic_ns()
        await work()
        self._ms[name].append((SYSTEM.monotonic_ns() - began) / 1e6)

    async def _append(self, subject: str) -> None:
        stored = await self._near.append(
            subject, _PAYLOAD, expected_last_subject_sequence=self._sequences[subject]
        )
        self._sequences[subject] = stored.sequence

    async def _delivery(self) -> None:
        polling = asyncio.create_task(self._work.fetch(limit=1, timeout=WAIT_S))
        await self._near.ready()  # the poll stands: its request went before, and this came back
        began = SYSTEM.monotonic_ns()
        storing = asyncio.create_task(self._near.append(_WORK.filter_subject, _PAYLOAD))
        (delivery,) = await polling
        self._ms["delivery"].append((SYSTEM.monotonic_ns() - began) / 1e6)
        await storing
        await delivery.ack()

    async def _live(self) -> None:
        began = SYSTEM.monotonic_ns()
        storing = asyncio.create_task(self._append(_FRAMES))
        await self._frames.next(WAIT_S)
        self._ms["live"].append((SYSTEM.monotonic_ns() - began) / 1e6)
        await storing
