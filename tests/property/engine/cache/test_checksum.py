"""The checksum sees every change of a word, every swap, and every block in another's place; arithmetic does not move it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.checksum import checksum

quick = settings(max_examples=60, deadline=None)


def block(seed: int, size: int = 512) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 99), word=st.integers(0, 511), bit=st.integers(0, 31))
@quick
def test_a_flipped_bit_changes_both_lanes(seed: int, word: int, bit: int) -> None:
    before = block(seed)
    after = before.clone()
    after.view(torch.int32)[word] ^= -(1 << 31) if bit == 31 else 1 << bit
    told, found = checksum(before), checksum(after)
    assert told.one != found.one
    assert told.two != found.two


@given(seed=st.integers(0, 99), places=st.lists(st.integers(0, 255), min_size=2, max_size=2, unique=True))
@quick
def test_words_that_swap_places_are_seen(seed: int, places: list[int]) -> None:
    before = block(seed)
    after = before.clone().view(torch.int64)
    after[places] = after[places[::-1]]
    assert checksum(after.view(torch.float32)) != checksum(before)


@given(seeds=st.sets(st.integers(0, 10**6), min_size=20, max_size=20))
@quick
def test_no_two_blocks_share_a_sum(seeds: set[int]) -> None:
    assert len({checksum(block(seed, 128)) for seed in seeds}) == len(seeds)


@given(seed=st.integers(0, 99), size=st.integers(2, 65))
@quick
def test_only_the_bits_count(seed: int, size: int) -> None:
    values = block(seed, size)
    strided = torch.stack([values, values], dim=-1)[..., 0]
    assert checksum(strided) == checksum(values) == checksum(values.clone())
    assert checksum(values[1:]) == checksum(values[1:].clone())
    negative = checksum(torch.tensor([-0.0, 1.0]))
    assert negative != checksum(torch.tensor([0.0, 1.0]))


def test_the_sum_is_fixed_for_good() -> None:
    """Written down, so that a device or a version of torch that computes another one is seen."""
    told = checksum(torch.arange(6, dtype=torch.float32))
    assert (told.one, told.two) == EXPECTED


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        checksum(torch.zeros(4, dtype=torch.float64))


EXPECTED = (6388037868797765650, -4633318895672350465)
