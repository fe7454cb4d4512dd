"""The broker at the queue: calls in, replies out, heartbeats noted. Everything else is `handlers`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, get_args

from opentelemetry.trace import SpanKind

from services.cache_broker import presence
from services.cache_broker.database import Database, Work
from services.cache_broker.handlers import Handlers
from shared.clock import Clock
from shared.errors import BurstlineError, ProtocolError
from shared.outage import Outage
from shared.protocol import codec, subjects
from shared.protocol.messages import BrokerCall, Heartbeat
from shared.telemetry import Telemetry, attached
from shared.transport.base import Received, Subscription, Transport

RETRY_S: Final = 1.0

_log = logging.getLogger(__name__)


async def serve(
    transport: Transport, handlers: Handlers, telemetry: Telemetry, *, concurrency: int
) -> list[Subscription]:
    """Answer every broker call as one of the queue group. Returns the subscriptions, to be closed at the drain."""
    served = []
    for kind in get_args(BrokerCall):
        subject = subjects.broker(kind)
        answer = answerer(kind, handlers, telemetry)
        served.append(await transport.serve(subject, subjects.BROKER_QUEUE, answer, concurrency=concurrency))
    return served


def answerer(
    kind: type[BrokerCall], handlers: Handlers, telemetry: Telemetry
) -> Callable[[Received], Awaitable[bytes]]:
    """The handler of one subject. Bytes that are no such call raise ProtocolError: there is no reply type for them."""
    name = f"broker {kind.__name__.lower()}"

    async def answer(received: Received) -> bytes:
        parent = telemetry.extract(received.headers)
        with telemetry.span(name, parent, kind=SpanKind.SERVER) as span, attached(span):
            reply = await handlers.answer(codec.decode_as(kind, received.data))
            if reply.failure is not None:
                span.set_attribute("error.type", reply.failure.code)
            return codec.encode(reply)

    return answer


async def hear(
    heartbeats: Subscription, database: Database, clock: Clock, *, new_epoch: Callable[[], Awaitable[None]]
) -> None:
    """Note heartbeats until cancelled. `new_epoch` runs after one that replaces a worker's older epoch."""
    outage = Outage(_log, "notes of heartbeats")
    async for received in heartbeats:
        try:
            beat = codec.decode_as(Heartbeat, received.data)
            if await database.run(_noter(beat, clock)):
                _log.info("worker %s began a new epoch: its old entries are gone", beat.worker_id)
                await new_epoch()
            outage.worked()
        except ProtocolError as error:
            _log.warning("a heartbeat cannot be read: %s", error.message)
        except BurstlineError as error:
            # The next beat is two seconds away; an outage must not end the listening.
            outage.failed(error.message)
            await asyncio.sleep(RETRY_S)


def _noter(beat: Heartbeat, clock: Clock) -> Work[bool]:
    return lambda connection: presence.note(connection, beat, now=clock.now())
