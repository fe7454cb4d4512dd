"""Whether the journal takes what this worker writes. A full disk is told as unready, so that work goes elsewhere."""

from __future__ import annotations

from typing import Final

from shared.clock import Clock


class JournalHealth:
    """Belongs to the event loop; attempts tell it of their appends.

    The fault is believed for `hold_s` after the last try that gave up. Then the worker is ready once more: an unready one
    is sent nothing, and would never learn that there is room again.
    """

    def __init__(self, clock: Clock, *, hold_s: float) -> None:
        self._clock: Final = clock
        self._hold_ns: Final = int(hold_s * 1e9)
        self._fault: str | None = None
        self._until_ns = 0

    def gave_up(self, code: str) -> None:
        """An append was tried in vain for the whole patience, at a server that answers."""
        self._fault = code
        self._until_ns = self._clock.monotonic_ns() + self._hold_ns

    def stored(self) -> None:
        """An append came through."""
        self._fault = None

    @property
    def fault(self) -> str | None:
        """Why nothing can be answered at present, or None."""
        if self._fault is None or self._clock.monotonic_ns() >= self._until_ns:
            return None
        return f"the journal takes nothing ({self._fault})"
