"""Finds stop strings in text that arrives in pieces, and holds back no more than what could still become one.

The match that is complete first wins (of several that end at one place, the one that begins first), so the outcome is a
function of the text alone and not of how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """Text that may be shown. `stopped`: a stop string followed it, and nothing after counts."""

    text: str
    stopped: bool


class StopMatcher:
    """One stream's search. Characters are code points: nothing is ever cut inside one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops: Final = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> Released:
        """Add `text`; get what is safe to show."""
        if not self._stops:
            return Released(text=text, stopped=False)
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            self._held = ""
            return Released(text=buffer[:match], stopped=True)
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return Released(text=buffer[: len(buffer) - keep], stopped=False)

    def flush(self) -> str:
        """Show what was held back: the text ended, or something came that no stop string spans."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> int | None:
        """Where the winning match begins."""
        found = [(begin + len(stop), begin) for stop in self._stops if (begin := buffer.find(stop)) >= 0]
        return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
