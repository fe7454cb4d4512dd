"""Copies come through the buffers in order and whole, wherever they lie."""

from __future__ import annotations

import pytest
import torch

from services.gpu_worker.engine.cache import staging
from services.gpu_worker.engine.cache.staging import STAGED, staged


@pytest.mark.parametrize("count", [1, STAGED, 2 * STAGED + 3])
@pytest.mark.parametrize("apart", [1, 2], ids=["neighbours", "with gaps"])
def test_all_rows_arrive_in_their_places(count: int, apart: int) -> None:
    slab = torch.arange(apart * count * 6, dtype=torch.float32).view(apart * count, 2, 3)
    rows = [slab[apart * number] for number in range(count)]
    like = torch.empty(0, dtype=torch.bfloat16)
    got = torch.full((count, 2, 3), torch.nan)
    for some, arrived in staged(rows, like):
        assert arrived.dtype == torch.bfloat16
        got[some] = arrived.float()
    assert torch.equal(got, torch.stack(rows).bfloat16().float())


def test_neighbours_are_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = 0
    copy = torch.Tensor.copy_

    def counted(into: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        nonlocal transfers
        transfers += 1
        return copy(into, other, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    slab = torch.randn(9, 4)
    list(staged([slab[number] for number in (0, 1, 2, 4, 5, 8)], slab))
    assert transfers == 3


def test_a_buffer_lasts_until_the_next_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGED", 1)
    slab = torch.arange(4.0).view(4, 1)
    pieces = [arrived for _, arrived in staged(list(slab), slab)]
    assert [piece.item() for piece in pieces] == [2.0, 3.0, 2.0, 3.0]
