"""The memo of a failed graph capture (R-S8, R-S18): whether a session's launches must run without one.

A device runner that captures its rounds as graphs marks the memo when a capture fails and reads it through
`VerifyRows.eager`. The CPU runner has no graphs: there the memo is set only in advance, by a replay.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class GraphFallback:
    """Eager for good (`premarked`), or until the session is resumed once more (`mark`)."""

    def __init__(self, *, premarked: bool) -> None:
        self._premarked = premarked
        self._failed = False

    @property
    def eager(self) -> bool:
        """Whether to launch without a graph."""
        return self._premarked or self._failed

    def mark(self) -> None:
        """A capture failed: the session goes on without graphs."""
        self._failed = True

    def reset(self) -> None:
        """Forget a failure, so that one transient fault does not slow a session for ever. Says so only if there was one."""
        if self._failed:
            self._failed = False
            log.info("a failed graph capture is forgotten: the session was resumed")
