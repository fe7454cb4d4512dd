"""Whether a stream takes what this process writes. A full stream, or a full disk, is told as unready, so that work goes elsewhere."""

from __future__ import annotations

from typing import Final

from shared.clock import Clock


class StoreHealth:
    """Belongs to the event loop; those who append tell it how that went.

    The fault is believed for `hold_s` after the last try that gave up. Then the process is ready once more: an unready one
    is sent nothing, and would never learn that there is room again.
    """

    def __init__(self, clock: Clock, what: str, *, hold_s: float) -> None:
        """`what` takes nothing, in the words of the fault."""
        self._clock: Final = clock
        self._what: Final = what
        self._hold_ns: Final = int(hold_s * 1e9)
        self._fault: str | None = None
        self._until_ns = 0

    def gave_up(self, code: str) -> None:
        """An append was given up, at a server that answers."""
        self._fault = code
        self._until_ns = self._clock.monotonic_ns() + self._hold_ns

    def stored(self) -> None:
        """An append came through."""
        self._fault = None

    @property
    def fault(self) -> str | None:
        """Why nothing can be stored at present, or None."""
        if self._fault is None or self._clock.monotonic_ns() >= self._until_ns:
            return None
        return f"{self._what} takes nothing ({self._fault})"
