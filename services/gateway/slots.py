"""How many requests may run at once: per key as the broker says, and in all. Taken or refused at once, never queued."""

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
        self._by_key: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """Requests that run now."""
        return self._by_key.total()

    @contextmanager
    def taken(self, identity: Identity) -> Iterator[None]:
        """Hold one slot for the block.

        Raises:
            QuotaExceeded: the key runs as many requests as it may.
            Overloaded: the gateway runs as many as it can.
        """
        if self.in_flight >= self._limit:
            raise Overloaded(f"this gateway already runs {self._limit} requests")
        key, most = identity.key_id, identity.max_concurrent
        if most is not None and self._by_key[key] >= most:
            raise QuotaExceeded(
                f"this key may run {most} requests at once", code="concurrency_limit_exceeded"
            )
        self._by_key[key] += 1
        try:
            yield
        finally:
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]
