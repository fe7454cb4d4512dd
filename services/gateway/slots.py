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

    def __init__(self, limit: int, *, per_tenant: int | None = None) -> None:
        """`limit` in all, and of one tenant at most `per_tenant`, or fewer if its own limit is lower."""
        self._limit: Final = limit
        self._per_tenant: Final = limit if per_tenant is None else per_tenant
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
            raise Overloaded(f"this gateway already runs {self._limit} requests", code="gateway_full")
        tenant = identity.tenant
        own = identity.max_concurrent
        most = self._per_tenant if own is None else min(own, self._per_tenant)
        if self._by_tenant[tenant] >= most:
            raise QuotaExceeded(
                f"this tenant may run {most} requests at once at a gateway", code="concurrency_limit_exceeded"
            )
        self._by_tenant[tenant] += 1
        try:
            yield
        finally:
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
