"""The ladder: the next verify is one column wider than the last one was right, `clamp(m + 2, 3, cap)` of m accepted drafts.

An alternative to the gate for drafters whose drafts all cost the same pass. It weighs no cost, so the floor alone tells it
that drafting does not pay (`DraftGate`).
"""

from __future__ import annotations

from typing import Final

from services.gpu_worker.engine.drafters.gate import DraftGate

LEAST_COLUMNS: Final = 3


class Ladder(DraftGate):
    """The ladder of one stream. `most` = drafts of the widest verify."""

    def __init__(self, *, most: int, floor: float = 0.0, floor_rounds: int = 1) -> None:
        super().__init__(most=most, cost=0.0, floor=floor, floor_rounds=floor_rounds)
        self._cap = most + 1
        self._columns = min(LEAST_COLUMNS, self._cap)

    @property
    def rungs(self) -> int:
        return self._cap

    def width(self) -> int:
        """Drafts for the next round: one column is the anchor's."""
        return self._columns - 1

    def observe(self, drafted: int, accepted: int) -> None:
        """A round that drafted less than asked, near the end of its budget, is a rung like any other."""
        super().observe(drafted, accepted)
        self._columns = min(max(accepted + 2, LEAST_COLUMNS), self._cap)
