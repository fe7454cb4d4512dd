"""Sparse attention's choice of keys on a card, interpreted: the twin's choice, in any launch, and attention to what was chosen."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention import AttentionPlan, CardAttention, card_chosen, device
from kernels.testing import poison

HEADS, WIDTH, BLOCKS, ROWS, LENGTH = 3, 8, 8, 64, 300
RANK, ROPE = 16, 8
ROW = RANK + ROPE + WIDTH


class Scene:
    """A sequence in scattered blocks of a poisoned plane, index keys at the end of its rows."""

    def __init__(self, *, coarse: bool = False) -> None:
        """`coarse` = few different scores, zeros of both signs among them, so that ties decide."""
        generator = torch.Generator().manual_seed(4)
        self.rows = torch.randn(LENGTH, ROW, generator=generator)
        self.query = torch.randn(LENGTH, HEADS, WIDTH, generator=generator)
        self.weights = torch.randn(LENGTH, HEADS, generator=generator)
        self.asks = torch.randn(LENGTH, 2, RANK + ROPE, generator=generator) * 0.3
        if coarse:
            self.rows[:, -WIDTH:] = self.rows[:, -WIDTH:].round()
            self.query, self.weights = self.query.round(), self.weights.round()
        self.plane = torch.empty(BLOCKS, 1, ROWS, ROW)
        poison(self.plane)
        self.table = torch.randperm(BLOCKS, generator=generator).to(torch.int32)
        for position in range(LENGTH):
            self.plane[self.table[position // ROWS], 0, position % ROWS] = self.rows[position]
        self.plane[self.table[LENGTH // ROWS], 0, LENGTH % ROWS :] = 0.0

    def launch(
        self, starts: list[int], counts: list[int], columns: int, most: int, *, prefill: bool = False
    ) -> AttentionPlan:
        """The narrowed plan of sequences that all are this one; padding rows hold NaN."""
        query = torch.full((len(starts), columns, HEADS, WIDTH), torch.nan)
        weights = torch.full((len(starts), columns, HEADS), torch.nan)
        for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
            query[number, :count] = self.query[start : start + count]
            weights[number, :count] = self.weights[start : start + count]
        card = CardAttention(
            block_tables=self.table.expand(len(starts), -1).contiguous(),
            starts=torch.tensor(starts, dtype=torch.int32),
            counts=torch.tensor(counts, dtype=torch.int32),
            columns=columns,
            max_splits=2,
            prefill=prefill,
        )
        plan = AttentionPlan.for_card(card)
        keys = self.plane[..., -WIDTH:]
        return device.narrowed(query.flatten(0, 1), weights.flatten(0, 1), keys, plan, most)

    def seen(self, plan: AttentionPlan, row: int, position: int) -> list[int]:
        assert plan.card is not None
        assert plan.card.seen is not None
        found: list[int] = plan.card.seen[row, : position + 1].nonzero().flatten().tolist()
        return found

    def expected(self, row: int, most: int) -> list[int]:
        each = (self.query[row] @ self.rows[: row + 1, -WIDTH:].T).relu_() * self.weights[row][:, None]
        total = each[0] + each[1] + each[2]
        return sorted(sorted(range(row + 1), key=lambda key: (-total[key].item(), key))[:most])


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("most", [40, 130])
def test_each_row_sees_the_twins_choice(most: int, coarse: bool) -> None:
    """Rows with fewer keys than `most` see all; ties go to the smallest key."""
    scene = Scene(coarse=coarse)
    plan = scene.launch([10, 126, 0, 295], [2, 5, 0, 5], 5, most)
    for number, (start, count) in enumerate(((10, 2), (126, 5), (0, 0), (295, 5))):
        for t in range(count):
            position = start + t
            assert scene.seen(plan, number * 5 + t, position) == scene.expected(position, most)


def test_c1_a_choice_does_not_depend_on_columns_and_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    whole = scene.launch([130], [50], 64, 40, prefill=True)
    monkeypatch.setattr(card_chosen, "_SLAB", 24)
    slabs = scene.launch([130], [50], 64, 40, prefill=True)
    for t in range(0, 50, 7):
        alone = scene.seen(scene.launch([130 + t], [1], 1, 40), 0, 130 + t)
        assert scene.seen(whole, t, 130 + t) == scene.seen(slabs, t, 130 + t) == alone


@pytest.mark.parametrize("prefill", [False, True])
def test_attention_sees_the_marked_keys_alone(prefill: bool, nan_filled_empty: None) -> None:
    scene = Scene()
    plan = scene.launch([20, 290], [3, 3], 4, 40, prefill=prefill)
    query = torch.full((2, 4, 2, RANK + ROPE), torch.nan)
    for number, start in enumerate((20, 290)):
        query[number, :3] = scene.asks[start : start + 3]
    out = device.attend_latent(query.flatten(0, 1), scene.plane, plan, RANK).unflatten(0, (2, 4))
    for number, start in enumerate((20, 290)):
        for t in range(3):
            rows = scene.rows[scene.expected(start + t, 40)].double()
            weights = (scene.asks[start + t].double() @ rows[:, : RANK + ROPE].T).softmax(-1)
            torch.testing.assert_close(
                out[number, t].double(), weights @ rows[:, :RANK], rtol=1e-5, atol=1e-6
            )
    assert not out[:, 3].any()


def test_nothing_is_computed_where_all_keys_are_chosen() -> None:
    scene = Scene()
    plan = scene.launch([5], [1], 1, BLOCKS * ROWS)
    assert plan.card is not None
    assert plan.card.seen is None
