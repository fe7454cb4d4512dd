"""The end of a round as a device kernel, interpreted, against its twin: every integer, every copied hidden."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from kernels.advance import NO_STOP, STOPS, RoundState, reference
from kernels.advance import device as card

MOST, COLUMNS, HIDDEN = 6, 5, 1640
"""So wide that hiddens of three columns do not fit into one program."""


def _state(generator: torch.Generator) -> RoundState:
    def drawn(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size or (MOST,), generator=generator, dtype=torch.int32)

    stops = torch.full((MOST, STOPS), NO_STOP, dtype=torch.int32)
    stops[::2, 0], stops[1, STOPS - 1] = 3, 2
    return RoundState(
        starts=drawn(0, 1000),
        counts=drawn(0, COLUMNS + 1),
        left=drawn(0, 9),
        wide=drawn(1, COLUMNS + 1),
        stops=stops,
        pending=drawn(0, 6),
        head=drawn(0, 11),
        store_after=drawn(0, 2),
        tail_tokens=torch.full((MOST, COLUMNS), -77, dtype=torch.int32),
        tail_counts=torch.full((MOST,), -77, dtype=torch.int32),
        tail_hidden=torch.full((MOST, COLUMNS, HIDDEN), torch.nan),
        capacity=11,
        fold_rows=4,
    )


def _copied(state: RoundState) -> RoundState:
    tensors = {field.name: getattr(state, field.name) for field in fields(state)}
    return replace(state, **{name: one.clone() for name, one in tensors.items() if isinstance(one, Tensor)})


@pytest.mark.parametrize("decreed", [False, True])
@pytest.mark.parametrize(("sequences", "columns"), [(1, 1), (6, 1), (5, 2), (6, 3), (2, 4), (6, 5)])
def test_the_end_of_a_round_is_the_twins(sequences: int, columns: int, decreed: bool) -> None:
    generator = torch.Generator().manual_seed(10 * sequences + columns)
    ended = stood = 0
    for _ in range(3):
        there = _state(generator)
        there.counts.clamp_(max=columns)
        here = _copied(there)
        picks = torch.randint(-1, 4, (sequences, columns), generator=generator, dtype=torch.int32)
        fed = torch.where(torch.rand(sequences, columns, generator=generator) < 0.6, picks, picks + 1).roll(
            1, 1
        )
        hidden = torch.randn(sequences, columns, HIDDEN, generator=generator)
        by_decree = torch.randint(0, COLUMNS, (MOST,), dtype=torch.int32) if decreed else None
        ids = fed.clone(), fed.clone()
        told = card.advance(there, picks, ids[0].contiguous(), hidden, decreed=by_decree)
        expected = reference.advance(here, picks, ids[1], hidden, decreed=by_decree)
        assert torch.equal(told, expected)
        assert torch.equal(*ids)
        for field in fields(there):
            one, other = getattr(there, field.name), getattr(here, field.name)
            if isinstance(one, Tensor):
                one, other = one.nan_to_num(-77.0), other.nan_to_num(-77.0)
                assert torch.equal(one, other), field.name
        ended += int((here.left[:sequences] == 0).sum())
        stood += int((told[:, -1] > 1).sum())
    assert sequences == 1 or (ended and (stood or columns == 1)), "the draws show nothing"


def _one(picks: list[int], fed: list[int], count: int, **changes: int) -> tuple[RoundState, list[int], int]:
    """The state after a round of one sequence, what was told, and its next anchor."""
    state = _state(torch.Generator().manual_seed(1))
    told_by = []
    for advance in (card.advance, reference.advance):
        mine, ids = _copied(state), torch.tensor([fed], dtype=torch.int32)
        mine.counts[0], mine.left[0], mine.wide[0] = count, 9, 4
        mine.stops[0] = NO_STOP
        for name, value in changes.items():
            getattr(mine, name)[0] = value
        hidden = torch.zeros(1, len(picks), HIDDEN)
        told = advance(mine, torch.tensor([picks], dtype=torch.int32), ids, hidden)
        told_by.append((mine, told[0].tolist(), int(ids[0, 0])))
    assert told_by[0][1:] == told_by[1][1:]
    return told_by[1]


def test_a_walk_ends_where_the_draft_differs_or_the_columns_do() -> None:
    assert _one([5, 6, 7, 8], [9, 5, 6, 7], 4)[1:] == ([5, 6, 7, 8, 5, 6, 7, 4], 8)
    assert _one([5, 6, 7, 8], [9, 5, 4, 7], 4)[1:] == ([5, 6, 7, 8, 5, 4, 7, 2], 6)
    assert _one([5, 6, 7, 8], [9, 5, 6, 7], 2)[1:] == ([5, 6, 7, 8, 5, 6, 7, 2], 6)
    state, _, _ = _one([5, 6, 7, 8], [9, 5, 6, 7], 4, left=6, starts=70)
    assert (int(state.left[0]), int(state.counts[0]), int(state.starts[0])) == (2, 2, 74)


def test_a_stop_id_ends_the_walk_and_the_sequence() -> None:
    state, told, anchor = _one([5, 3, 7, 8], [9, 5, 3, 7], 4, stops=3)
    assert (told[-1], anchor, int(state.left[0]), int(state.counts[0])) == (2, 3, 0, 0)


def test_a_broken_row_ends_the_sequence() -> None:
    state, told, anchor = _one([5, -1, 7, 8], [9, 5, 0, 7], 4)
    assert (told[-1], anchor, int(state.left[0]), int(state.counts[0])) == (2, 0, 0, 0)


def test_a_state_is_stored_once_enough_rows_wait_and_never_after_the_end() -> None:
    state, _, _ = _one([5, 6], [9, 5], 2, pending=3, store_after=0, head=10)
    assert (int(state.pending[0]), int(state.head[0]), int(state.store_after[0])) == (5, 10, 1)
    state, _, _ = _one([5, 6], [9, 5], 2, pending=5, store_after=1, head=10)
    assert (int(state.pending[0]), int(state.head[0]), int(state.store_after[0])) == (2, 4, 0)
    state, _, _ = _one([5, 6], [9, 5], 2, pending=4, store_after=0, left=2)
    assert (int(state.pending[0]), int(state.store_after[0])) == (6, 0)


def test_rows_that_are_not_contiguous_are_refused() -> None:
    state = _state(torch.Generator().manual_seed(1))
    picks = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="contiguous"):
        card.advance(state, picks[:, :2], picks[:, :2].contiguous(), torch.zeros(2, 2, HIDDEN))
