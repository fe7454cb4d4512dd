"""The gate that keeps speculation from costing more than it brings."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.drafters.gate import PROBE_ROUNDS, DraftGate


def run(gate: DraftGate, accepts: int, rounds: int) -> list[int]:
    """Widths of rounds in which the first `accepts` drafts stand."""
    widths = []
    for _ in range(rounds):
        widths.append(gate.width())
        gate.observe(widths[-1], min(widths[-1], accepts))
    return widths


def test_a_good_drafter_keeps_its_length() -> None:
    assert set(run(DraftGate(most=3, cost=0.35), 3, 50)) == {3}


def test_fr_22_a_useless_drafter_is_turned_off_and_only_tried_now_and_then() -> None:
    widths = run(DraftGate(most=3, cost=0.35), 0, 20 * PROBE_ROUNDS)
    assert widths[0] == 3
    tail = widths[2 * PROBE_ROUNDS :]
    assert set(tail) == {0, 1}
    assert sum(tail) == len(tail) // PROBE_ROUNDS


def test_a_drafter_that_recovers_comes_back() -> None:
    gate = DraftGate(most=3, cost=0.35)
    run(gate, 0, 60)
    assert run(gate, 3, 40 * PROBE_ROUNDS)[-1] == 3


@pytest.mark.parametrize("most", [5, 7])
def test_a_drafter_whose_drafts_all_stand_gets_its_whole_length_within_a_few_rounds(most: int) -> None:
    widths = run(DraftGate(most=most, cost=0.35), most, 12)
    assert widths[0] < most, "the prior alone does not pay for so many"
    assert set(widths[6:]) == {most}


@pytest.mark.parametrize("cost", [0.25, 0.35])
@pytest.mark.parametrize("stands", [0.8, 0.9, 0.95])
def test_what_the_widths_bring_is_within_a_few_percent_of_the_best_fixed_one(
    cost: float, stands: float
) -> None:
    def rate(k: int) -> float:
        return sum(stands**i for i in range(k + 1)) / (1 + k * cost)

    draw, gate, brought = random.Random(5), DraftGate(most=7, cost=cost), []
    for _ in range(400):
        width = gate.width()
        brought.append(rate(width))
        gate.observe(width, next((i for i in range(width) if draw.random() > stands), width))
    assert statistics.mean(brought) > 0.96 * max(map(rate, range(8)))


def test_fr_22_a_drafter_that_never_agrees_is_off_after_three_rounds() -> None:
    assert run(DraftGate(most=5, cost=0.35), 0, 6)[3:] == [0, 0, 0]


def test_it_stops_where_drafts_stop_standing() -> None:
    widths = run(DraftGate(most=5, cost=0.2), 2, 200)[100:]
    assert set(widths) == {2, 3}
    assert widths.count(3) <= 100 // PROBE_ROUNDS + 1


@pytest.mark.parametrize("accepts", [0, 1, 3])
def test_without_a_cost_every_draft_is_asked_for(accepts: int) -> None:
    assert set(run(DraftGate(most=3, cost=0.0), accepts, 50)) == {3}


@given(outcomes=st.lists(st.integers(0, 7), max_size=60), most=st.integers(1, 7), cost=st.floats(0, 2))
@settings(max_examples=50, deadline=None)
def test_fr_39_widths_are_a_function_of_the_rounds(outcomes: list[int], most: int, cost: float) -> None:
    first, second = DraftGate(most=most, cost=cost), DraftGate(most=most, cost=cost)
    for accepts in outcomes:
        assert first.width() == second.width() <= most
        for gate in (first, second):
            gate.observe(gate.width(), min(gate.width(), accepts))


def test_fr_22_under_the_floor_it_says_useless() -> None:
    gate = DraftGate(most=3, cost=0.35, floor=1.1, floor_rounds=32)
    run(gate, 0, 31)
    assert not gate.useless
    run(gate, 0, 1)
    assert gate.useless


@pytest.mark.parametrize("cost", [0.0, 0.35])
def test_fr_22_over_the_floor_it_never_does(cost: float) -> None:
    gate = DraftGate(most=3, cost=cost, floor=1.1, floor_rounds=32)
    run(gate, 1, 1000)
    assert not gate.useless


def test_fr_22_rounds_without_a_proposal_are_not_held_against_it() -> None:
    gate = DraftGate(most=3, cost=0.1, floor=1.1, floor_rounds=8)
    for _ in range(100):
        gate.observe(0, 0)
    assert not gate.useless
    for _ in range(8):
        gate.observe(3, 0)
    assert gate.useless


def test_without_a_floor_nothing_is_useless() -> None:
    gate = DraftGate(most=3, cost=0.0)
    run(gate, 0, 500)
    assert not gate.useless
