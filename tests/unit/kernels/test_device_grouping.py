"""Items sorted by group, interpreted: places, tiles, items of no group, and the number of tiles that a graph is sized by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.grouping import group, most_tiles


def _ids(items: int, groups: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, groups + 1, (items,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize(
    ("items", "groups", "rows"), [(1, 1, 16), (7, 3, 4), (130, 5, 16), (600, 3, 64), (64, 64, 16)]
)
def test_every_item_of_a_group_is_in_one_tile_of_it(items: int, groups: int, rows: int) -> None:
    ids = _ids(items, groups, items)
    told = group(ids, groups, rows)
    tiles = int(told.tiles)
    assert tiles <= most_tiles(items, groups, rows)
    found: list[int] = []
    for tile in range(tiles):
        start, end = int(told.tile_start[tile]), int(told.tile_end[tile])
        assert 0 < end - start <= rows
        members = told.order[start:end]
        assert ids[members.long()].eq(told.tile_group[tile]).all()
        found += members.tolist()
    wanted = [item for slot in range(groups) for item in (ids == slot).nonzero()[:, 0].tolist()]
    assert found == wanted, "by group, then in their own order"


def test_without_members_there_are_no_tiles() -> None:
    told = group(torch.full((9,), -1, dtype=torch.int32), 4, 16)
    assert int(told.tiles) == 0


def test_one_group_may_have_everything() -> None:
    told = group(torch.zeros(100, dtype=torch.int32), 4, 16)
    assert int(told.tiles) == 7
    assert told.order.tolist() == list(range(100))
    assert told.tile_end[:7].tolist() == [16, 32, 48, 64, 80, 96, 100]
