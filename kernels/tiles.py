"""The constants that decide in which order numbers are added. Changing one changes bits, hence the fingerprint."""

from __future__ import annotations

from typing import Final

ROWS: Final = 64
"""Rows of a KV block, of an attention split, of a prefill query tile and of a gated-delta chunk."""

DECODE_COLUMNS: Final = 8
"""Query columns of one decode/verify attention tile; longer verifies take several tiles."""

MATMUL_TILE: Final = 16
"""Rows of every product of the fallback matmul (measured: MKL row bits vary with other row counts)."""

UNIT_ROWS: Final = 128
"""Card: weight rows of a matmul unit, of the stored layout and of a product tile; prefill and decode share one copy."""

UNIT_COLUMNS: Final = 64
"""Card: weight columns of a unit: 128 bytes of bfloat16, the widest swizzle of shared memory."""

RUNS: Final = 132
"""Card: programs that a decode product wants, one a multiprocessor of an H200. A constant, not read off the device."""

LEAST_RUN: Final = 8
"""Card: units of a run at least, so that small weights do not spend their time adding parts."""

PICK_SPLIT: Final = 4096
"""Card: vocabulary ids of one program of a pick; the sum behind a log probability is added split by split."""

ADAPTER_SLICE: Final = 1024
"""Card: inputs of one slice of an adapter's first product; slices are added in order."""

SPLIT_ROWS: Final = 256
"""Card: keys of one split of decode and verify attention; split s holds [256 s, 256 s + 256) of every sequence."""

STATE_COLUMNS: Final = 32
"""Card: state columns of one program of the delta step: lines of 128 bytes, and 128 registers a thread for the state of a
128-wide key."""

STATE_GROUPS: Final = 4
"""Card: runs of neighbouring keys that the delta step adds one by one, then together: a run lies in one lane, which so
reads a row's keys four at a time."""


def tile_table() -> dict[str, int]:
    """All constants by name, for the fingerprint."""
    return {
        "rows": ROWS,
        "decode_columns": DECODE_COLUMNS,
        "matmul_tile": MATMUL_TILE,
        "unit_rows": UNIT_ROWS,
        "unit_columns": UNIT_COLUMNS,
        "runs": RUNS,
        "least_run": LEAST_RUN,
        "pick_split": PICK_SPLIT,
        "adapter_slice": ADAPTER_SLICE,
        "split_rows": SPLIT_ROWS,
        "state_columns": STATE_COLUMNS,
        "state_groups": STATE_GROUPS,
    }
