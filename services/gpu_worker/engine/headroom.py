"""How many sequences one verify may hold, learnt from launches that did not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

CLEAN_LAUNCHES: Final = 64
"""Launches that fit, after which one more sequence is tried."""


class Headroom:
    """Halves on a launch that did not fit, grows by one again after a while of launches that did.

    So a launch that fails because of its size is cut until it fits, and one that fails because of a single sequence
    ends up with that sequence alone, which is then to blame.
    """

    def __init__(self, most: int) -> None:
        self._most = self._width = most
        self._clean = 0

    @property
    def width(self) -> int:
        """Most sequences of the next verify, at least 1."""
        return self._width

    def groups(self, items: Sequence[T]) -> list[Sequence[T]]:
        """The items in order, at most `width` together."""
        return [items[first : first + self._width] for first in range(0, len(items), self._width)]

    def fitted(self) -> None:
        """A launch fitted."""
        self._clean += 1
        if self._clean >= CLEAN_LAUNCHES:
            self._clean = 0
            self._width = min(self._most, self._width + 1)

    def exceeded(self, together: int) -> None:
        """A launch of so many sequences did not fit."""
        self._clean = 0
        self._width = max(1, min(self._width, together) // 2)
