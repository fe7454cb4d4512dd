"""Sparse attention's choice of keys against a plain one, whatever the tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import AttentionPlan, QueryTile, chosen
from kernels.testing import poison

HEADS, WIDTH, BLOCKS, ROWS = 3, 8, 7, 64
LENGTH = 300
TABLE = (4, 0, 6, 2, 5)


class Scene:
    """A sequence whose keys are written in scattered blocks of a poisoned plane."""

    def __init__(self, *, coarse: bool = False) -> None:
        """`coarse` = few different scores, so that ties decide."""
        generator = torch.Generator().manual_seed(4)
        self.key = torch.randn(LENGTH, WIDTH, generator=generator)
        self.query = torch.randn(LENGTH, HEADS, WIDTH, generator=generator)
        self.weights = torch.randn(LENGTH, HEADS, generator=generator)
        if coarse:
            self.key, self.query, self.weights = (
                part.round() for part in (self.key, self.query, self.weights)
            )
        self.plane = torch.empty(BLOCKS, 1, ROWS, 5 + WIDTH)
        poison(self.plane)
        for row in range(LENGTH):
            self.plane[TABLE[row // ROWS], 0, row % ROWS, 5:] = self.key[row]

    def seen(self, tiles: list[tuple[int, int]], tile_rows: int, most: int) -> list[list[int]]:
        """Keys that each real row sees, of tiles of (first row, rows)."""
        plan = AttentionPlan.build(
            [QueryTile(start, count, start + count - 1, TABLE) for start, count in tiles], tile_rows, 1
        )
        query, weights = (
            torch.zeros(len(tiles), tile_rows, HEADS, WIDTH),
            torch.zeros(len(tiles), tile_rows, HEADS),
        )
        for number, (start, count) in enumerate(tiles):
            query[number, :count] = self.query[start : start + count]
            weights[number, :count] = self.weights[start : start + count]
        narrow = chosen.narrowed(query.flatten(0, 1), weights.flatten(0, 1), self.plane[..., 5:], plan, most)
        out = []
        for number, (_, count) in enumerate(tiles):
            items = (plan.tile_of == number).nonzero().flatten()
            free = ~narrow.hidden[items, 0, :count, 0]
            out += [
                sorted(int(plan.split_of[items[i]]) * ROWS + j for i, j in free[:, row].nonzero().tolist())
                for row in range(count)
            ]
        return out

    def expected(self, row: int, most: int) -> list[int]:
        scores: Tensor = (self.query[row] @ self.key[: row + 1].T).relu_() * self.weights[row][:, None]
        total = scores[0] + scores[1] + scores[2]
        order = sorted(range(row + 1), key=lambda key: (-total[key].item(), key))
        return sorted(order[:most])


@pytest.mark.parametrize("most", [40, 64, 130])
def test_each_row_sees_its_best_keys_or_all(most: int) -> None:
    scene = Scene()
    rows = [10, *range(120, 184)]
    got = scene.seen([(10, 1), (120, 64)], 64, most)
    assert got == [scene.expected(row, most) for row in rows]


def test_c1_a_choice_does_not_depend_on_tiles_and_ties_go_to_the_smallest_key() -> None:
    scene = Scene(coarse=True)
    tall = scene.seen([(192, 64), (256, 44)], 64, 70)
    assert tall == [scene.expected(row, 70) for row in range(192, 300)]
    alone = [scene.seen([(row, 1)], 8, 70)[0] for row in range(192, 300, 9)]
    assert alone == tall[::9]
    assert scene.seen([(5, 3), (250, 8), (131, 2)], 8, 70)[3:11] == tall[58:66]


def test_nothing_is_computed_where_all_keys_are_chosen() -> None:
    plan = AttentionPlan.build([QueryTile(60, 4, 63, TABLE)], 8, 1)
    nothing = torch.zeros(8, HEADS, WIDTH)
    assert chosen.narrowed(nothing, nothing[..., 0], torch.empty(0), plan, 64) is plan
