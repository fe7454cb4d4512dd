"""How much is in the queue, and when more of it is refused: a model's queue and a tenant's are bounded.

Looked at once a second and counted on from there by what this gateway adds, so between two looks several gateways may
go over a limit by what each of them lets in; each of those requests holds a place at its gateway (`slots`). A queue that
cannot be looked at refuses nothing here: then nothing can be enqueued either.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

from shared.errors import BurstlineError, Overloaded, QuotaExceeded
from shared.outage import Outage
from shared.protocol import subjects
from shared.transport.base import Transport

_log = logging.getLogger(__name__)
_RETRY_S: Final = 5


class Queues:
    """The picture of one gateway. `run` keeps it."""

    def __init__(self, transport: Transport, *, per_model: int, per_tenant: int, look_s: float) -> None:
        self._transport: Final = transport
        self._per_model: Final = per_model
        self._per_tenant: Final = per_tenant
        self._look_s: Final = look_s
        self._outage: Final = Outage(_log, "looks at the queue")
        self._by_lane: Counter[tuple[str, str]] = Counter()
        self._by_model: Counter[str] = Counter()

    async def run(self) -> None:
        """Look every `look_s`. Ends by cancellation alone."""
        while True:
            await self.look()
            await asyncio.sleep(self._look_s)

    async def look(self) -> None:
        """Count what is there, by subject."""
        try:
            counts = await self._transport.waiting(subjects.REQUESTS.name, subjects.REQUESTS.subjects[0])
        except BurstlineError as error:
            self._outage.failed(error.code)
            counts = {}
        else:
            self._outage.worked()
        self._by_lane.clear()
        self._by_model.clear()
        for subject, count in counts.items():
            self._count(subject, count)

    def added(self, subject: str) -> None:
        """This gateway enqueued a request."""
        self._count(subject, 1)

    def _count(self, subject: str, requests: int) -> None:
        fingerprint = subjects.fingerprint_of(subject)
        self._by_lane[fingerprint, subjects.lane_of(subject)] += requests
        self._by_model[fingerprint] += requests

    def admit(self, fingerprint: str, tenant: str, *, requests: int = 1) -> None:
        """Let `requests` more of a tenant in, whose queue is all that is in its lane, at whichever worker.

        Raises:
            QuotaExceeded: `tenant_queue_full`, its own queue has no room for them.
            Overloaded: `queue_full`, the model's has not.
        """
        model = subjects.short(fingerprint)
        if self._by_lane[model, subjects.lane(tenant)] + requests > self._per_tenant:
            raise QuotaExceeded(
                f"this tenant may have {self._per_tenant} requests in the queue of a model",
                code="tenant_queue_full",
            )
        if self._by_model[model] + requests > self._per_model:
            raise Overloaded(
                f"a model may have {self._per_model} requests in its queue",
                code="queue_full",
                retry_after_s=_RETRY_S,
            )
