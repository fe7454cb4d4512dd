"""Which query tile reads which KV block, made once a forward and used by every plane.

A *tile* is a fixed number of consecutive query rows of one sequence; an *item* is one (tile, split) pair, a split being
one 64-row KV block. Items are ordered by tile, then by ascending split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.tiles import ROWS

_ALL = 1 << 62
"""A window that no position leaves."""


@dataclass(frozen=True, slots=True)
class QueryTile:
    """`columns` real query rows from absolute position `start`; keys up to `last_key` have been written.

    With a `window` W > 0 the row at t sees keys t - W < p <= t, and the table need not hold older ones; 0 = all.
    """

    start: int
    columns: int
    last_key: int
    block_table: Sequence[int]
    window: int = 0

    @property
    def first_key(self) -> int:
        """The first key that any row of the tile sees."""
        return max(0, self.start - self.window + 1) if self.window else 0

    @property
    def first_split(self) -> int:
        """The KV block of `first_key`."""
        return self.first_key // ROWS

    @property
    def splits(self) -> int:
        """KV blocks from there on that hold keys up to the tile's last real row."""
        return (self.start + self.columns - 1) // ROWS + 1 - self.first_split


@dataclass(frozen=True, slots=True)
class CardAttention:
    """A launch as a captured graph reads it: int32 tensors at fixed addresses, filled before every launch.

    Query rows are [S * columns]; row t of a sequence is at position start + t, is real when t < count, and sees the keys
    up to its own. A padded sequence has count 0: its table is not read, it writes nothing, its rows are answered as zeros.
    """

    block_tables: Tensor
    """[S, B]: the block of rows 64 b on; those that fell out of the window may hold anything."""
    starts: Tensor
    """[S]."""
    counts: Tensor
    """[S]: at most `columns`."""
    columns: int
    max_splits: int
    """Splits of 256 keys that the launch has programs for; those past a sequence's end exit at once."""
    window: int = 0
    """Keys that a row sees, itself among them; 0 = all before it."""
    prefill: bool = False
    """The phase: unsplit tiles of a prompt chunk, or a few columns in splits. They round in another order."""
    seen: Tensor | None = None
    """Of sparse attention: [S * columns, 64 B] uint8, 1 for each key up to a row's own that the row sees."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where a launch's keys and values go, and how far its rows are turned."""

    cos_sin: Tensor
    """[M, 2, rotary_dim / 2] float32."""
    targets: Tensor
    """Of the twin: [real rows * kv_heads] int64 rows of a flattened KV plane."""
    real_rows: Tensor | None = None
    """Of the twin: int64 rows that are no padding; None when all are real."""
    card: CardAttention | None = None
    """On a card: tables, starts and counts, and targets are not read."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Index tensors of one forward; see the module for tile, split and item. On a card `card` says it all and the rest
    is empty."""

    tile_rows: int
    """Query rows of a tile, a constant of the phase."""
    tiles: int
    blocks: Tensor
    """[items] int64: KV block."""
    tile_of: Tensor
    """[items] int64."""
    split_of: Tensor
    """[items] int64, counted from the tile's first split."""
    max_splits: int
    hidden: Tensor
    """[items, 1, tile_rows, 1, 64] bool: the key is after the query row, or before its window."""
    stale: Tensor | None
    """int64 rows of the gathered [items * kv_heads * 64] values that no one wrote or that fell out of every window,
    zeroed because 0 * NaN is NaN."""
    card: CardAttention | None = None

    @classmethod
    def for_card(cls, card: CardAttention) -> AttentionPlan:
        """The plan of a launch on a card."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(card.columns, 0, none, none, none, 0, none, None, card)

    @classmethod
    def build(cls, tiles: Sequence[QueryTile], tile_rows: int, kv_heads: int) -> AttentionPlan:
        """Plan for tiles of `tile_rows` rows each (rows past `columns` are padding)."""
        blocks: list[int] = []
        tile_of: list[int] = []
        split_of: list[int] = []
        stale: list[Tensor] = []
        for number, tile in enumerate(tiles):
            splits, first = tile.splits, tile.first_split
            item = len(blocks)
            gone, written = tile.first_key - first * ROWS, tile.last_key + 1 - (first + splits - 1) * ROWS
            if gone:
                stale.append(_value_rows(item, kv_heads, range(gone)))
            if written < ROWS:
                stale.append(_value_rows(item + splits - 1, kv_heads, range(written, ROWS)))
            blocks.extend(tile.block_table[first : first + splits])
            tile_of.extend([number] * splits)
            split_of.extend(range(splits))
        of_tile = torch.tensor(tile_of, dtype=torch.int64)
        of_split = torch.tensor(split_of, dtype=torch.int64)
        origins = torch.tensor([tile.start - tile.first_split * ROWS for tile in tiles], dtype=torch.int64)
        starts = origins[of_tile] - of_split * ROWS
        query = (starts[:, None] + torch.arange(tile_rows))[:, :, None]
        hidden = torch.arange(ROWS) > query
        if any(tile.window for tile in tiles):
            reach = torch.tensor([tile.window or _ALL for tile in tiles], dtype=torch.int64)[of_tile]
            hidden |= torch.arange(ROWS) <= query - reach[:, None, None]
        return cls(
            tile_rows=tile_rows,
            tiles=len(tiles),
            blocks=torch.tensor(blocks, dtype=torch.int64),
            tile_of=of_tile,
            split_of=of_split,
            max_splits=max(tile.splits for tile in tiles),
            hidden=hidden[:, None, :, None],
            stale=torch.cat(stale) if stale else None,
        )


def _value_rows(item: int, kv_heads: int, rows: range) -> Tensor:
    """Rows of one item's block in the gathered [items * kv_heads * 64] values, of every head."""
    first = torch.arange(item * kv_heads, (item + 1) * kv_heads) * ROWS
    return (first[:, None] + torch.arange(rows.start, rows.stop)).flatten()
