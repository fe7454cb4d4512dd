"""The constants that decide in which order numbers are added. Changing one changes bits, hence the fingerprint."""

from __future__ import annotations

from typing import Final

ROWS: Final = 64
"""Rows of a KV block, of an attention split, of a prefill query tile and of a gated-delta chunk."""

DECODE_COLUMNS: Final = 8
"""Query columns of one decode/verify attention tile; longer verifies take several tiles."""

MATMUL_TILE: Final = 16
"""Rows of every product of the fallback matmul (measured: MKL row bits vary with other row counts)."""


def tile_table() -> dict[str, int]:
    """All constants by name, for the fingerprint."""
    return {"rows": ROWS, "decode_columns": DECODE_COLUMNS, "matmul_tile": MATMUL_TILE}
