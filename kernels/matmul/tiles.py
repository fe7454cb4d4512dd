"""The fixed cut of the card's decode products, and the tiles that its row counts take.

The cut of a weight's units into runs decides bits and is a function of (N, K) alone. The row tile does not: any of them
gives a row the same bits (`kernels.gate` checks it on the card), so it is chosen by the row count for speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kernels.tiles import LEAST_RUN, RUNS, UNIT_COLUMNS, UNIT_ROWS


@dataclass(frozen=True, slots=True)
class Cut:
    """A weight in units of [UNIT_ROWS, UNIT_COLUMNS], numbered column tile by column tile."""

    tiles: int
    """Column tiles."""
    steps: int
    """Units of a column tile, padded to an even number."""
    each: int
    """Units of a run, an even number."""
    runs: int


def cut(n: int, k: int) -> Cut:
    """The cut of an [n, k] weight: `RUNS` equal runs, or a few more or less where runs then end with column tiles.

    A shared tile costs its parts' way through memory and a wait at the end, so a tenth of imbalance is the better deal.
    """
    tiles, steps = -(-n // UNIT_ROWS), -(-k // (2 * UNIT_COLUMNS)) * 2
    units = tiles * steps
    each = max(LEAST_RUN, -(-units // (2 * RUNS)) * 2)
    whole = max(1, round(each / steps)) * steps
    if abs(whole - each) * 10 <= each:
        each = whole
    return Cut(tiles, steps, each, -(-units // each))


@dataclass(frozen=True, slots=True)
class RowTile:
    """How one program of a decode product works; nothing here changes a bit."""

    rows: int
    """Rows of x in a tile."""
    deep: int
    """Units along K in a step."""
    stages: int
    warps: int
    swap: bool
    """The weight is the left operand: the instruction's 64 rows are the weight's, and x may have 16."""


_TILES: Final = (
    RowTile(16, 1, 5, 4, True),
    RowTile(32, 2, 4, 4, True),
    RowTile(64, 2, 4, 8, False),
    RowTile(128, 1, 4, 8, False),
)


_FLOAT8_TILES: Final = (
    RowTile(16, 2, 5, 4, True),
    RowTile(32, 2, 5, 4, True),
    RowTile(64, 2, 4, 8, True),
    RowTile(128, 2, 3, 8, True),
)
"""Always swapped: the left operand may come from registers, where a float8 weight is widened."""


def row_tile(rows: int, *, float8: bool = False) -> RowTile:
    """The smallest tile that holds the rows, or the largest there is."""
    tiles = _FLOAT8_TILES if float8 else _TILES
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])
