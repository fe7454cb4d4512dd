"""How many requests may run at once at this gateway: a tenant's, whichever keys it uses, and in all. Taken or refused at
once, never queued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shared.errors import Overloaded, QuotaExceeded
from shared.protocol.messages import Identity


class Slots:
    """Counts running requests of this gateway."""

    def __init__(self, limit: int) -> None:
        self._limit: Final = limit
        self._by_tenant: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """Requests that run now."""
        return self._by_tenant.total()

    @contextmanager
    def taken(self, identity: Identity) -> Iterator[None]:
        """Hold one slot for the block.

        Raises:
            QuotaExceeded: the tenant runs as many requests as it may.
            Overloaded: the gateway runs as many as it can.
        """
        if self.in_flight >= self._limit:
            raise Overloaded(f"this gateway already runs {self._limit} requests")
        tenant, most = identity.tenant, identity.max_concurrent
        if most is not None and self._by_tenant[tenant] >= most:
            raise QuotaExceeded(
                f"this tenant may run {most} requests at once", code="concurrency_limit_exceeded"
            )
        self._by_tenant[tenant] += 1
        try:
            yield
        finally:
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
