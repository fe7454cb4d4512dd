"""Is what a reader hears live in the journal too? A full or failing stream refuses messages that subscribers still see.

    heard, stored ──> (nothing to do)
    heard, refused ──> heard again and again while the worker tries ──> for `limit_s` no growth ──> Overloaded

A worker stores one message before it sends the next, so a new frame tells that the one before is stored: a stream that is
well never asks. A message of a worker that lost its claim is heard once, and a long prime is silent: neither counts.
"""

from __future__ import annotations

from typing import Final

from shared.clock import Clock
from shared.errors import Overloaded


class StorageWatch:
    """Of one reader. Told of live messages by `heard`, and of the journal's by `found`."""

    def __init__(self, clock: Clock, *, quiet_s: float, limit_s: float) -> None:
        """After `quiet_s` of repetition the journal is worth a look, after `limit_s` it is given up."""
        self._clock: Final = clock
        self._quiet_ns: Final = int(quiet_s * 1e9)
        self._limit_ns: Final = int(limit_s * 1e9)
        self._data: bytes | None = None
        self._first_ns: int | None = None
        self._last_ns = 0
        self._stored = 0

    @property
    def journalled(self) -> bool:
        """Whether the journal is known to hold something of the request."""
        return self._stored > 0

    def heard(self, data: bytes, *, claim: bool) -> bool:
        """A live message, a claim or one that follows a claim. Whether the journal is worth a look."""
        now = self._clock.monotonic_ns()
        follows = not claim and data != self._data
        if self._first_ns is None or follows:
            self._first_ns = now
        self._data, self._last_ns = data, now
        return now - self._first_ns >= self._quiet_ns

    def found(self, sequence: int, data: bytes) -> None:
        """A message that the journal holds."""
        if sequence > self._stored or data == self._data:
            self._first_ns = None
        self._stored = max(self._stored, sequence)

    def check(self) -> None:
        """After the journal was read to its end.

        Raises:
            Overloaded: `journal_stuck`, the worker has tried for too long.
        """
        if self._first_ns is not None and self._last_ns - self._first_ns >= self._limit_ns:
            raise Overloaded("the answer could not be stored", code="journal_stuck", retry_after_s=5)
