"""The fixed tiles of the card's products: functions of (N, K) alone.

A unit is one [UNIT_ROWS, UNIT_COLUMNS] tile of the weight. Units are numbered column tile by column tile, K ascending, and cut
into equal runs, one a program; a column tile whose K lies in several programs is added in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.tiles import LEAST_RUN, RUNS, UNIT_COLUMNS, UNIT_ROWS


@dataclass(frozen=True, slots=True)
class Stream:
    """How a decode product reads its weight."""

    tiles: int
    """Column tiles."""
    steps: int
    """Units of a column tile."""
    each: int
    """Units a program."""
    programs: int


def stream(n: int, k: int) -> Stream:
    """The cut of an [n, k] weight."""
    tiles, steps = -(-n // UNIT_ROWS), -(-k // UNIT_COLUMNS)
    units = tiles * steps
    each = max(LEAST_RUN, -(-units // RUNS))
    return Stream(tiles, steps, each, -(-units // each))
