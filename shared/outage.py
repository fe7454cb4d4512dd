"""A fault that comes again and again is told once, and its end once: a log that repeats itself hides what matters."""

from __future__ import annotations

import logging
from typing import Final

from shared.clock import SYSTEM, Clock


class Outage:
    """Of one thing that is tried again and again. Keeps the log to two lines an outage."""

    def __init__(self, log: logging.Logger, what: str, *, clock: Clock = SYSTEM) -> None:
        """`what` fails, in a word or two, as the log has it ("heartbeats")."""
        self._log: Final = log
        self._what: Final = what
        self._clock: Final = clock
        self._since_ns: int | None = None
        self._tries = 0

    def failed(self, reason: str) -> None:
        """A try failed. The first one of an outage is told."""
        self._tries += 1
        if self._since_ns is None:
            self._since_ns = self._clock.monotonic_ns()
            self._log.warning("%s fail (%s); told once until they work again", self._what, reason)

    def worked(self) -> None:
        """A try came through. The first one after an outage is told."""
        if self._since_ns is None:
            return
        seconds = (self._clock.monotonic_ns() - self._since_ns) / 1e9
        self._log.info("%s work again after %.0f s and %d failures", self._what, seconds, self._tries)
        self._since_ns, self._tries = None, 0
