"""Latent rows on a card, interpreted: written where the twin writes them, and zeros behind the newest."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention import CardAttention, WritePlan, device, reference
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
