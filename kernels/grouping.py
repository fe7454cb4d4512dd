"""Items sorted by group on a card, and the tiles of rows that a grouped product runs over: experts, adapters.

The number of tiles that so many items can fill is a function of the counts of items and groups, so a CUDA graph can
replay a product over it whatever the groups turn out to be: programs past the last tile exit.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import PDL

_CHUNKS: Final = (128, 512, 2048)
"""Items that a program may look at in one step. Integers leave no trace of the steps that they were added in."""


class Groups(NamedTuple):
    """All int32. Places start..end-1 of a tile hold items of one group, in ascending order."""

    order: Tensor
    """[items]: the item at each place."""
    tile_group: Tensor
    """[most tiles], like the next two; behind `tiles` they hold anything."""
    tile_start: Tensor
    tile_end: Tensor
    tiles: Tensor
    """[1]: how many are in use."""


def most_tiles(items: int, groups: int, rows: int) -> int:
    """Tiles of `rows` rows that `items` can fill at most."""
    return min(items, groups + items // rows)


def group(ids: Tensor, groups: int, rows: int) -> Groups:
    """Sort items by their group `ids` (int32, any shape); an id outside 0..groups-1 belongs to none and gets no tile."""
    items = ids.numel()
    order = torch.empty(items, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(3, most_tiles(items, groups, rows), dtype=torch.int32, device=ids.device)
    count = torch.empty(1, dtype=torch.int32, device=ids.device)
    chunk = next((size for size in _CHUNKS if size >= items), _CHUNKS[-1])
    _place[(groups,)](
        ids, order, tiles[0], tiles[1], tiles[2], count, items, GROUPS=groups,
        BINS=triton.next_power_of_2(groups + 1), CHUNK=chunk, ROWS=rows, num_warps=chunk // 256 or 1, **PDL,
    )  # fmt: skip
    return Groups(order, tiles[0], tiles[1], tiles[2], count)


@triton.jit
def items_of(order, tile_start, tile_end, tile, BLOCK_M: tl.constexpr):
    """(places, which of them belong to the tile, the items there): BLOCK_M each."""
    place = tl.load(tile_start + tile) + tl.arange(0, BLOCK_M)
    live = place < tl.load(tile_end + tile)
    return place, live, tl.load(order + place, mask=live, other=0)


@triton.jit
def _group_of(ids, at, items, GROUPS: tl.constexpr):
    """Groups of items `at`; GROUPS for those that belong to none."""
    found = tl.load(ids + at, mask=at < items, other=GROUPS)
    return tl.where((found >= 0) & (found < GROUPS), found, GROUPS)


@triton.jit(do_not_specialize=["items"])
def _place(
    ids, order, tile_group, tile_start, tile_end, tile_count, items,
    GROUPS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The items of one group to their places, in their own order, and its tiles. Grid (groups,)."""
    own_group, bins = tl.program_id(0), tl.arange(0, BINS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, items, CHUNK):
        at = first + tl.arange(0, CHUNK)
        counts += tl.histogram(_group_of(ids, at, items, GROUPS), BINS)
    tiles = tl.where(bins < GROUPS, (counts + ROWS - 1) // ROWS, 0)
    mine = tl.sum(tl.where(bins == own_group, counts, 0), axis=0)
    place = tl.sum(tl.where(bins < own_group, counts, 0), axis=0)
    tile, end = tl.sum(tl.where(bins < own_group, tiles, 0), axis=0), place + mine
    if own_group == 0:
        tl.store(tile_count, tl.sum(tiles, axis=0))
    if mine > 0:
        for start in range(place, end, ROWS):
            tl.store(tile_group + tile, own_group)
            tl.store(tile_start + tile, start)
            tl.store(tile_end + tile, tl.minimum(start + ROWS, end))
            tile += 1
        for first in range(0, items, CHUNK):
            at = first + tl.arange(0, CHUNK)
            own = (_group_of(ids, at, items, GROUPS) == own_group).to(tl.int32)
            tl.store(order + place + tl.cumsum(own, axis=0) - 1, at, mask=own > 0)
            place += tl.sum(own, axis=0)
