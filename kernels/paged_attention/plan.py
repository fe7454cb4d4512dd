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


@dataclass(frozen=True, slots=True)
class QueryTile:
    """`columns` real query rows from absolute position `start`; keys up to `last_key` have been written."""

    start: int
    columns: int
    last_key: int
    block_table: Sequence[int]

    @property
    def splits(self) -> int:
        """KV blocks that hold keys up to the tile's last real row."""
        return (self.start + self.columns - 1) // ROWS + 1


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Index tensors of one forward; see the module for tile, split and item."""

    tile_rows: int
    """Query rows of a tile, a constant of the phase."""
    tiles: int
    blocks: Tensor
    """[items] int64: KV block."""
    tile_of: Tensor
    """[items] int64."""
    split_of: Tensor
    """[items] int64."""
    max_splits: int
    hidden: Tensor
    """[items, 1, tile_rows, 1, 64] bool: the key is after the query row."""
    stale: Tensor | None
    """int64 rows of the gathered [items * kv_heads * 64] values that no one wrote, zeroed because 0 * NaN is NaN."""

    @classmethod
    def build(cls, tiles: Sequence[QueryTile], tile_rows: int, kv_heads: int) -> AttentionPlan:
        """Plan for tiles of `tile_rows` rows each (rows past `columns` are padding)."""
        blocks: list[int] = []
        tile_of: list[int] = []
        split_of: list[int] = []
        stale: list[Tensor] = []
        for number, tile in enumerate(tiles):
            splits = tile.splits
            item = len(blocks) + splits - 1
            written = min(tile.last_key + 1 - (splits - 1) * ROWS, ROWS)
            if written < ROWS:
                first = torch.arange(item * kv_heads, (item + 1) * kv_heads) * ROWS
                stale.append((first[:, None] + torch.arange(written, ROWS)).flatten())
            blocks.extend(tile.block_table[:splits])
            tile_of.extend([number] * splits)
            split_of.extend(range(splits))
        of_tile = torch.tensor(tile_of, dtype=torch.int64)
        of_split = torch.tensor(split_of, dtype=torch.int64)
        starts = torch.tensor([tile.start for tile in tiles], dtype=torch.int64)[of_tile] - of_split * ROWS
        query = starts[:, None] + torch.arange(tile_rows)
        hidden = torch.arange(ROWS) > query[:, :, None]
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
