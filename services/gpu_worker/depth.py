"""How much waits in the queues that this worker pulls, for whoever scales workers by it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from services.gpu_worker.core import Core
from shared.errors import BurstlineError
from shared.protocol.subjects import PRIORITIES
from shared.transport.base import PullConsumer

log = logging.getLogger(__name__)

QUEUES: Final = ("own", *PRIORITIES)
"""Names of the consumers of `subjects.worker_consumers`, in their order."""
_LOOK_S: Final = 10.0


async def watch_depth(core: Core, consumers: Sequence[PullConsumer]) -> None:
    """Keep the gauge. Ends by cancellation alone; while the server is away the last picture stays."""
    while True:
        try:
            for name, consumer in zip(QUEUES, consumers, strict=True):
                core.metrics.queue_depth.labels(name).set(await consumer.pending())
        except BurstlineError as error:
            log.debug("the queues could not be looked at (%s)", error.code)
        await asyncio.sleep(_LOOK_S)
