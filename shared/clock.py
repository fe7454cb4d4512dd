"""The one place where time is read, so that tests can hold it still."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Wall time for records, monotonic time for durations, processor time for what work costs."""

    def now(self) -> datetime:
        """Aware UTC wall time."""

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch, for span times and message stamps."""

    def monotonic_ns(self) -> int:
        """Nanoseconds that never go back, for durations and deadlines inside a process."""

    def thread_ns(self) -> int:
        """Nanoseconds of a processor that the calling thread had: what others take of the machine is not in them."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)  # noqa: TID251 - this module is the exception the rule exists for

    def wall_ns(self) -> int:
        return time.time_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def thread_ns(self) -> int:
        return time.thread_time_ns()


class ManualClock:
    """A clock that tests move by hand."""

    def __init__(self, start_ns: int = 1_750_000_000_000_000_000) -> None:
        self._wall = start_ns
        self._monotonic = 0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._wall / 1e9, UTC)

    def wall_ns(self) -> int:
        return self._wall

    def monotonic_ns(self) -> int:
        return self._monotonic

    def thread_ns(self) -> int:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        step = int(seconds * 1e9)
        self._wall += step
        self._monotonic += step


SYSTEM = SystemClock()
