"""Paged attention's device kernels, interpreted: values against a dense softmax, bits against every way to launch a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.norm_rope.reference import rope_table
from kernels.paged_attention import AttentionPlan, CardAttention, WritePlan, device, reference
from kernels.paged_attention.card_splits import _tile
from kernels.testing import poison

BLOCKS, ROWS = 24, 64


class Pages:
    """Two sequences with scattered blocks in a poisoned plane, written up to `length` as a launch leaves it."""

    def __init__(self, length: int, heads: int, kv_heads: int, width: int) -> None:
        generator = torch.Generator().manual_seed(length * 7 + width)
        self.heads, self.kv_heads, self.width, self.length = heads, kv_heads, width, length
        self.keys, self.values = (torch.empty(BLOCKS, kv_heads, ROWS, width) for _ in range(2))
        poison(self.keys, self.values)
        order = torch.randperm(BLOCKS, generator=generator).to(torch.int32)
        self.tables = order.view(2, -1)
        self.query = torch.randn(2, length, heads, width, generator=generator) * width**-0.5
        self.gate = torch.randn(2, length, heads * width, generator=generator)
        self.fresh = torch.randn(2, 2, length, kv_heads, width, generator=generator)
        for part, pool in zip(self.fresh, (self.keys, self.values), strict=True):
            for sequence in range(2):
                for position in range(length):
                    block = self.tables[sequence, position // ROWS]
                    pool[block, :, position % ROWS] = part[sequence, position]
        if length % ROWS:
            self.values[self.tables[:, length // ROWS], :, length % ROWS :] = 0.0

    def dense(self, sequence: int, position: int, window: int = 0) -> Tensor:
        """Float64, gated: [heads, d]."""
        seen = slice(max(0, position - window + 1) if window else 0, position + 1)
        group = self.heads // self.kv_heads
        keys, values = (part[sequence, seen].double().repeat_interleave(group, 1) for part in self.fresh)
        query = self.query[sequence, position].double()
        weights = torch.einsum("hd,khd->hk", query, keys).softmax(-1)
        gate = self.gate[sequence, position].double().view(self.heads, -1)
        return torch.einsum("hk,khd->hd", weights, values) * gate.sigmoid()

    def launch(
        self,
        sequences: list[int],
        starts: list[int],
        counts: list[int],
        columns: int,
        *,
        window: int = 0,
        prefill: bool = False,
        splits: int = 3,
    ) -> Tensor:
        """[S, columns, heads, d]; padding rows hold NaN in query and gate."""
        query = torch.full((len(sequences), columns, self.heads, self.width), torch.nan)
        gate = torch.full((len(sequences), columns, self.heads * self.width + 8), torch.nan)
        for number, (sequence, start, count) in enumerate(zip(sequences, starts, counts, strict=True)):
            query[number, :count] = self.query[sequence, start : start + count]
            gate[number, :count, : self.heads * self.width] = self.gate[sequence, start : start + count]
        card = CardAttention(
            block_tables=self.tables[sequences].contiguous(),
            starts=torch.tensor(starts, dtype=torch.int32),
            counts=torch.tensor(counts, dtype=torch.int32),
            columns=columns,
            max_splits=splits,
            window=window,
            prefill=prefill,
        )
        out = device.attend(
            query.flatten(0, 1),
            self.keys,
            self.values,
            AttentionPlan.for_card(card),
            gate.flatten(0, 1)[:, : self.heads * self.width],
        )
        return out.view(query.shape)


def _close(actual: Tensor, expected: Tensor) -> None:
    assert not actual.isnan().any()
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < 2e-6, f"relative error {error:.2e}"


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (3, 1, 24), (2, 2, 64), (16, 1, 16)])
@pytest.mark.parametrize("prefill", [False, True])
def test_values(heads: int, kv_heads: int, width: int, prefill: bool) -> None:
    pages = Pages(70, heads, kv_heads, width)
    out = pages.launch([1, 0], [63, 0], [7, 3], 9, prefill=prefill)
    for number, (sequence, start, count) in enumerate(((1, 63, 7), (0, 0, 3))):
        expected = torch.stack([pages.dense(sequence, start + t) for t in range(count)])
        _close(out[number, :count], expected)
        assert torch.equal(out[number, count:], torch.zeros_like(out[number, count:]))


@pytest.mark.parametrize("position", [0, 63, 64, 255, 256, 257, 519])
def test_a_row_has_its_bits_in_any_verify(position: int) -> None:
    pages = Pages(540, 4, 2, 16)
    alone = pages.launch([0], [position], [1], 1)[0, 0]
    _close(alone, pages.dense(0, position))
    for back, columns in ((1, 4), (2, 33)):
        start = max(0, position - back)
        count = min(columns, pages.length - start, 5)
        out = pages.launch([1, 0, 0], [3, start, 0], [2, count, 0], columns, splits=5)
        assert torch.equal(out[1, position - start], alone)
        assert torch.equal(out[2], torch.zeros_like(out[2]))


@pytest.mark.parametrize(
    ("group", "columns", "tile"),
    [(6, 1, 16), (6, 2, 16), (6, 4, 32), (6, 16, 32), (8, 16, 32), (17, 1, 32), (33, 1, 64), (64, 16, 64)],
)
def test_the_query_tile_follows_group_and_columns(group: int, columns: int, tile: int) -> None:
    assert _tile(group, columns) == tile


def test_a_large_group_fills_the_largest_tile() -> None:
    pages = Pages(66, 40, 1, 8)
    out = pages.launch([1], [64], [2], 2, splits=1)
    for t in range(2):
        torch.testing.assert_close(out[0, t].double(), pages.dense(1, 64 + t), rtol=1e-5, atol=1e-5)


def test_a_group_that_no_tile_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="65 query heads"):
        _tile(65, 1)


@pytest.mark.parametrize("window", [1, 64, 70, 300])
@pytest.mark.parametrize("prefill", [False, True])
def test_a_window(window: int, prefill: bool) -> None:
    pages = Pages(384, 2, 1, 16)
    start = 330
    gone = (start - window + 1) // ROWS if window < start else 0
    for block in pages.tables[1, :gone]:
        pages.keys[block], pages.values[block] = torch.nan, torch.nan
    out = pages.launch([1], [start], [3], 3, window=window, prefill=prefill)
    _close(out[0], torch.stack([pages.dense(1, start + t, window) for t in range(3)]))


def test_any_cut_of_a_prefill_gives_the_same_bits() -> None:
    pages = Pages(280, 2, 1, 16)
    whole = pages.launch([0], [0], [280], 320, prefill=True)[0, :280]
    for cuts in ((64, 216), (192, 88)):
        first = 0
        for count in cuts:
            part = pages.launch([0], [first], [count], -(-count // 64) * 64, prefill=True)[0, :count]
            assert torch.equal(part, whole[first : first + count])
            first += count


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "half"), [(4, 2, 16, 4), (2, 1, 24, 12), (3, 3, 32, 4)]
)
@pytest.mark.parametrize(("eps", "gated"), [(1e-6, True), (1e-6, False), (None, False)])
def test_write(heads: int, kv_heads: int, width: int, half: int, eps: float | None, gated: bool) -> None:
    columns, starts, counts = 3, [62, 0], [3, 1]
    generator = torch.Generator().manual_seed(width)
    y = torch.randn(2 * columns, ((1 + gated) * heads + 2 * kv_heads) * width, generator=generator)
    scale = torch.rand(heads + kv_heads, width, generator=generator) + 0.5
    tables = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    positions = torch.tensor(starts)[:, None] + torch.arange(columns)
    cos_sin = rope_table(2 * half, 100.0, 80).index_select(0, positions.flatten())
    card = CardAttention(
        block_tables=tables,
        starts=torch.tensor(starts, dtype=torch.int32),
        counts=torch.tensor(counts, dtype=torch.int32),
        columns=columns,
        max_splits=1,
    )
    where = [(int(tables[s, p // ROWS]), p % ROWS) for s, p in ((0, 62), (0, 63), (0, 64), (1, 0))]
    targets = torch.tensor([(b * kv_heads + h) * ROWS + r for b, r in where for h in range(kv_heads)])
    plan = WritePlan(cos_sin, targets, torch.tensor([0, 1, 2, 3]), card)
    expected_pools, pools = (
        [torch.full((4, kv_heads, ROWS, width), 7.0) for _ in range(2)] for _ in range(2)
    )
    expected = reference.qk_norm_rope_write(y, scale, *expected_pools, plan, eps)
    query = device.qk_norm_rope_write(y, scale, *pools, plan, eps)
    torch.testing.assert_close(query[:4], expected[:4], rtol=1e-5, atol=1e-6)
    for block, first in (
        (1, 1),
        (0, 1),
    ):  # behind the last row of either sequence the page's values are zeros
        expected_pools[1][block, :, first:] = 0.0
    for one, other in zip(expected_pools, pools, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
