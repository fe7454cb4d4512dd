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
    slices: int
    """Runs of a column tile, about equal; 0: runs of `each` units that end where they end."""
    each: int
    """Units of a run where slices is 0, an even number."""
    runs: int
    """Never more than `RUNS` times the programs of a multiprocessor: a second wave costs what a run costs."""


def programs_of(n: int, k: int, *, float8: bool) -> int:
    """Programs of a decode product that share a multiprocessor.

    One reads bfloat16 as fast as memory goes. Widening float8 takes so long that others must read meanwhile: two of them,
    or three where a weight is wide or long enough for it.
    """
    if not float8:
        return 1
    return 3 if n > RUNS * UNIT_ROWS or k >= UNIT_ROWS * UNIT_COLUMNS else 2


def cut(n: int, k: int, *, programs: int = 1) -> Cut:
    """The cut of an [n, k] weight for `programs` of a multiprocessor.

    A shared tile costs its parts' way through memory and a wait at the end, so runs end with column tiles where that
    leaves at most a fifth of the programs without work or a tenth of the work uneven.
    """
    tiles, steps = -(-n // UNIT_ROWS), -(-k // (2 * UNIT_COLUMNS)) * 2
    most = max(1, steps // LEAST_RUN)
    runs = RUNS * programs
    slices = min(runs // tiles, most)
    if slices and (5 * tiles * slices >= 4 * runs or slices == most):
        return Cut(tiles, steps, slices, 0, tiles * slices)
    each = max(LEAST_RUN, -(-tiles * steps // (2 * runs)) * 2)
    whole = -(-each // steps) * steps
    each = whole if 10 * whole <= 11 * each else each
    return Cut(tiles, steps, 0, each, -(-tiles * steps // each))


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
    late: bool = False
    """The next launch may start when the weights are read, not when this one starts: quicker with 64 rows of a
    bfloat16 weight and more."""


_TILES: Final = {
    1: (
        RowTile(16, 2, 4, 4, True),
        RowTile(32, 2, 4, 4, True),
        RowTile(64, 2, 4, 8, False, late=True),
        RowTile(128, 1, 6, 8, False, late=True),
    ),
    2: (
        RowTile(16, 2, 4, 4, True),
        RowTile(32, 1, 4, 4, True),
        RowTile(64, 1, 4, 4, True),
        RowTile(128, 2, 3, 8, True),
    ),
    3: (
        RowTile(16, 1, 5, 4, True),
        RowTile(32, 1, 4, 4, True),
        RowTile(64, 1, 4, 4, True),
        RowTile(128, 2, 3, 8, True),
    ),
}
"""By programs of a multiprocessor. More than one are float8's: always swapped, since the left operand may come from
registers, where a float8 weight is widened."""


_SLICED: Final = RowTile(64, 2, 3, 4, False, late=True)
"""64 rows of a bfloat16 weight whose tiles are sliced: more of a run is its end, which four warps are through sooner."""


def row_tile(rows: int, at: Cut, *, programs: int = 1) -> RowTile:
    """The smallest tile that holds the rows, or the largest there is."""
    tiles = _TILES[programs]
    tile = next((tile for tile in tiles if rows <= tile.rows), tiles[-1])
    return _SLICED if programs == 1 and at.slices > 1 and tile.rows == _SLICED.rows else tile
