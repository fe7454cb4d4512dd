"""Latent rows on a card, interpreted: where they are written, and attention to them."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention import AttentionPlan, CardAttention, QueryTile, WritePlan, device, reference
from kernels.testing import poison

BLOCKS, ROWS, WIDTH = 9, 64, 40


def _plans(starts: list[int], counts: list[int], columns: int) -> tuple[torch.Tensor, WritePlan, WritePlan]:
    """Scattered tables, and the plans of the kernel and of the twin."""
    tables = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    tables = tables[: 3 * len(starts)].view(len(starts), 3)
    card = CardAttention(
        block_tables=tables,
        starts=torch.tensor(starts, dtype=torch.int32),
        counts=torch.tensor(counts, dtype=torch.int32),
        columns=columns,
        max_splits=1,
    )
    real = [s * columns + t for s, count in enumerate(counts) for t in range(count)]
    places = [
        int(tables[s, (start + t) // ROWS]) * ROWS + (start + t) % ROWS
        for s, (start, count) in enumerate(zip(starts, counts, strict=True))
        for t in range(count)
    ]
    nothing = torch.empty(0)
    twin = WritePlan(nothing, torch.tensor(places), torch.tensor(real))
    return tables, WritePlan(nothing, torch.empty(0, dtype=torch.int64), None, card), twin


@pytest.mark.parametrize(
    ("starts", "counts", "columns"), [([5, 62, 0], [3, 4, 0], 4), ([64, 120], [64, 30], 64), ([191], [1], 1)]
)
def test_rows_lie_where_the_twin_puts_them(starts: list[int], counts: list[int], columns: int) -> None:
    tables, card, twin = _plans(starts, counts, columns)
    rows = torch.randn(len(starts) * columns, WIDTH, generator=torch.Generator().manual_seed(1))
    written, expected = (torch.empty(BLOCKS, 1, ROWS, WIDTH) for _ in range(2))
    poison(written, expected)
    device.write_latent(rows, written, card)
    reference.write_latent(rows, expected, twin)
    for table, start, count in zip(tables.tolist(), starts, counts, strict=True):
        end = start + count
        if count and end % ROWS:
            expected[table[(end - 1) // ROWS], :, end % ROWS :] = 0.0
    assert torch.equal(written.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_rows_of_another_width_are_refused() -> None:
    _, card, _ = _plans([0], [1], 1)
    with pytest.raises(ValueError, match="do not fit a plane of one head, 40 wide"):
        device.write_latent(torch.zeros(1, 24), torch.zeros(BLOCKS, 1, ROWS, WIDTH), card)


RANK, ROPE = 24, 16


class Pages:
    """One sequence in scattered blocks of a poisoned plane, zeros behind its newest row as a launch leaves it."""

    def __init__(self, length: int, heads: int) -> None:
        generator = torch.Generator().manual_seed(length + heads)
        self.heads = heads
        self.plane = torch.empty(BLOCKS, 1, ROWS, WIDTH)
        poison(self.plane)
        self.table = torch.randperm(BLOCKS, generator=generator).to(torch.int32)
        self.fresh = torch.randn(length, WIDTH, generator=generator)
        self.query = torch.randn(length, heads, WIDTH, generator=generator) * WIDTH**-0.5
        for position in range(length):
            self.plane[self.table[position // ROWS], 0, position % ROWS] = self.fresh[position]
        if length % ROWS:
            self.plane[self.table[length // ROWS], 0, length % ROWS :] = 0.0

    def launch(
        self, starts: list[int], counts: list[int], columns: int, *, prefill: bool = False
    ) -> torch.Tensor:
        """[S, columns, heads, RANK], of sequences that all are this one; padding rows hold NaN in the query."""
        query = torch.full((len(starts), columns, self.heads, WIDTH), torch.nan)
        for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
            query[number, :count] = self.query[start : start + count]
        card = CardAttention(
            block_tables=self.table.expand(len(starts), -1).contiguous(),
            starts=torch.tensor(starts, dtype=torch.int32),
            counts=torch.tensor(counts, dtype=torch.int32),
            columns=columns,
            max_splits=2,
            prefill=prefill,
        )
        plan = AttentionPlan.for_card(card)
        return device.attend_latent(query.flatten(0, 1), self.plane, plan, RANK).unflatten(0, (-1, columns))

    def dense(self, position: int) -> torch.Tensor:
        """Float64: [heads, RANK]."""
        keys = self.fresh[: position + 1].double()
        weights = (self.query[position].double() @ keys.T).softmax(-1)
        return weights @ keys[:, :RANK]


@pytest.mark.parametrize("heads", [3, 70])
def test_attention_to_latents_is_a_softmax_over_the_rows_before(heads: int, nan_filled_empty: None) -> None:
    """Heads that divide no tile and that do not fit one; a row in the second split; padding is zeros."""
    pages = Pages(270, heads)
    out = pages.launch([266, 63, 0], [2, 1, 0], 3)
    for sequence, first, count in ((0, 266, 2), (1, 63, 1)):
        for t in range(count):
            torch.testing.assert_close(
                out[sequence, t].double(), pages.dense(first + t), rtol=1e-5, atol=1e-6
            )
    assert not out[2].any()
    assert not out[1, 1:].any()
    chunk = pages.launch([64], [3], 8, prefill=True)[0]
    for t in range(3):
        torch.testing.assert_close(chunk[t].double(), pages.dense(64 + t), rtol=1e-5, atol=1e-6)


def test_c1_a_rows_bits_know_neither_columns_nor_cuts() -> None:
    pages = Pages(260, 5)
    wide = pages.launch([255], [4], 4)[0]
    for t in range(4):
        assert torch.equal(pages.launch([255 + t, 10], [1, 1], 1)[0, 0], wide[t])
    whole = pages.launch([0], [70], 80, prefill=True)[0]
    for first, count in ((0, 16), (16, 48), (64, 6)):
        part = pages.launch([first], [count], 48, prefill=True)[0]
        assert torch.equal(part[:count], whole[first : first + count])


def test_the_twin_reads_a_row_as_key_and_as_value() -> None:
    pages = Pages(100, 3)
    table = [int(block) for block in pages.table]
    plan = AttentionPlan.build([QueryTile(96, 4, 99, table)], 8, 1)
    query = torch.zeros(8, 3, WIDTH)
    query[:4] = pages.query[96:]
    out = reference.attend_latent(query, pages.plane, plan, RANK)
    for t in range(4):
        torch.testing.assert_close(out[t].double(), pages.dense(96 + t), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "rank", "message"), [(6, 4, "16 bytes"), (40, 22, "16 bytes")])
def test_pieces_off_sixteen_bytes_are_refused(width: int, rank: int, message: str) -> None:
    card = CardAttention(*(torch.zeros(1, dtype=torch.int32) for _ in range(3)), columns=1, max_splits=1)
    plane = torch.zeros(1, 1, ROWS, width)
    with pytest.raises(ValueError, match=message):
        device.attend_latent(torch.zeros(1, 2, width), plane, AttentionPlan.for_card(card), rank)
