"""The checksum as a device kernel, interpreted: integers, so its sums are the twin's to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.checksum import device as card
from kernels.checksum import reference


def _rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 5, 64, 8191, 8194])
def test_sums_are_the_twins(width: int, dtype: torch.dtype) -> None:
    rows = _rows(3, width, dtype)
    assert torch.equal(card.checksums(rows), reference.checksums(rows))


def test_no_rows_have_no_sums() -> None:
    assert card.checksums(torch.zeros(0, 8)).shape == (0, 2)


def test_nan_and_negative_zero_are_bits_like_others() -> None:
    rows = torch.tensor([[torch.nan, 0.0], [torch.nan, -0.0]])
    told = card.checksums(rows)
    assert torch.equal(told, reference.checksums(rows))
    assert not torch.equal(told[0], told[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_summed_where_they_lie(dtype: torch.dtype) -> None:
    """The sum of scattered planes is the sum of the copy that the host tier keeps."""
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(3, 5, 2, 64, 8, generator=generator).to(dtype) for _ in range(2))
    blocks = torch.tensor([4, 0, 2])
    told = card.block_checksums((keys, values), blocks)
    assert torch.equal(told, reference.block_checksums((keys, values), blocks))
    for row, block in zip(told, blocks.tolist(), strict=True):
        copy = torch.stack([keys[:, block], values[:, block]])
        assert torch.equal(row, reference.checksums(copy[None])[0])


def test_scattered_blocks_must_be_whole_words() -> None:
    pool = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="whole words"):
        card.block_checksums((pool, pool), torch.tensor([0]))
