"""Lifetime counters of a session (R-S12)."""

from __future__ import annotations

from services.gpu_worker.engine.events import SpecTelemetry


class SessionCounters:
    """Only ever grows. Positions count drafts within a round, the first one 0."""

    def __init__(self) -> None:
        self._rounds = 0
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self.replayed = 0  #: see `SpecTelemetry`
        self.capture_failures = 0

    def round(self, drafted: int, accepted: int) -> None:
        """One verify pass: `drafted` proposals, the first `accepted` of which stood."""
        self._rounds += 1
        while len(self._drafted) < drafted:
            self._drafted.append(0)
            self._accepted.append(0)
        for position in range(drafted):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted

    def read(self) -> SpecTelemetry:
        """The counters as they stand."""
        return SpecTelemetry(
            rounds=self._rounds,
            drafted=sum(self._drafted),
            accepted=sum(self._accepted),
            drafted_at=tuple(self._drafted),
            accepted_at=tuple(self._accepted),
            replayed=self.replayed,
            capture_failures=self.capture_failures,
        )
