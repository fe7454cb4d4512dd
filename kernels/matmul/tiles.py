"""The fixed cut of the card's decode products, and the tiles that its row counts take.

The cut (how many slices of K a weight has) decides bits and is a function of (N, K) alone. The row tile does not: any of
them gives a row the same bits (`kernels.gate` checks it on the card), so it is chosen by the row count for speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kernels.tiles import MOST_SLICES, RUNS, SLICE_UNITS, UNIT_COLUMNS, UNIT_ROWS


@dataclass(frozen=True, slots=True)
class Cut:
    """A weight in units of [UNIT_ROWS, UNIT_COLUMNS]."""

    unit_rows: int
    """Units down N."""
    steps: int
    """Units along K, padded to an even number."""
    slices: int
    """Slices of K that are added in ascending order."""


def cut(n: int, k: int) -> Cut:
    """The cut of an [n, k] weight: enough slices that a narrow one keeps every multiprocessor reading."""
    unit_rows, steps = -(-n // UNIT_ROWS), -(-k // (2 * UNIT_COLUMNS)) * 2
    slices = max(1, min(MOST_SLICES, round(RUNS / unit_rows), steps // SLICE_UNITS))
    return Cut(unit_rows, steps, slices)


@dataclass(frozen=True, slots=True)
class RowTile:
    """How one program of a decode product works; nothing here changes a bit."""

    rows: int
    """Rows of x in a tile."""
    wide: int
    """Units down N."""
    deep: int
    """Units along K in a step."""
    stages: int
    warps: int
    swap: bool
    """The weight is the left operand: the instruction's 64 rows are the weight's, and x may have 16."""
    early: int
    """Units asked for before the wait for x."""


_TILES: Final = (
    RowTile(16, 1, 1, 5, 4, True, 6),
    RowTile(32, 1, 1, 5, 4, True, 6),
    RowTile(64, 1, 2, 4, 8, False, 6),
    RowTile(128, 1, 1, 4, 8, False, 4),
)


_FLOAT8_TILES: Final = (
    RowTile(16, 1, 2, 5, 4, True, 6),
    RowTile(32, 1, 2, 5, 4, True, 6),
    RowTile(64, 1, 2, 4, 8, True, 6),
    RowTile(128, 1, 2, 3, 8, True, 4),
)
"""Always swapped: the left operand may come from registers, where a float8 weight is widened."""


def row_tile(rows: int, *, float8: bool = False) -> RowTile:
    """The smallest tile that holds the rows, or the largest there is."""
    tiles = _FLOAT8_TILES if float8 else _TILES
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])
