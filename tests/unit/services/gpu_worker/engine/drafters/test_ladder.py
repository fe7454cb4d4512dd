"""The ladder: clamp(m + 2, 3, cap) columns after m accepted drafts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.drafters.ladder import Ladder


def test_the_verify_width_follows_the_last_round() -> None:
    ladder = Ladder(most=7)
    widths = [ladder.width()]
    for accepted in (2, 4, 6, 7, 0, 1):
        ladder.observe(ladder.width(), accepted)
        widths.append(ladder.width())
    assert [width + 1 for width in widths] == [3, 4, 6, 8, 8, 3, 3]


@pytest.mark.parametrize("most", [1, 2])
def test_a_cap_under_the_least_width_stands(most: int) -> None:
    ladder = Ladder(most=most)
    ladder.observe(1, 1)
    assert ladder.width() == most


def test_fr_22_the_floor_still_holds() -> None:
    ladder = Ladder(most=7, floor=1.5, floor_rounds=4)
    for _ in range(4):
        assert not ladder.useless
        ladder.observe(2, 0)
    assert ladder.useless


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 15), st.lists(st.integers(0, 15), max_size=20))
def test_it_never_asks_for_more_than_there_is(most: int, rounds: list[int]) -> None:
    ladder = Ladder(most=most)
    for accepted in rounds:
        drafted = ladder.width()
        assert 1 <= drafted <= most
        ladder.observe(drafted, min(accepted, drafted))
