"""Plans are pure functions of the picture."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.limits import EngineLimits, SpecGate
from services.gpu_worker.engine.scheduler import Room, Speculation, admissions, plan_step, speculation
from shared.errors import EngineFault

LIMITS = EngineLimits(burst_rounds=8, busy_burst_rounds=2)


@pytest.mark.parametrize(
    ("waiting", "room", "count"),
    [
        ([2, 2, 2], Room(blocks=5, slots=9, batch=9), 2),
        ([2, 2, 2], Room(blocks=99, slots=1, batch=9), 1),
        ([2, 2, 2], Room(blocks=99, slots=9, batch=2), 2),
        ([9, 1], Room(blocks=5, slots=9, batch=9), 0),
        ([], Room(blocks=5, slots=9, batch=9), 0),
    ],
    ids=["blocks", "slots", "batch", "head holds back", "empty"],
)
def test_admissions(waiting: list[int], room: Room, count: int) -> None:
    assert admissions(waiting, room) == count


def test_a_long_prompt_gets_one_chunk_and_streams_short_bursts() -> None:
    plan = plan_step([1000, 200], 3, prefill_chunk=256, limits=LIMITS)
    assert plan.prefill == (256, 0)
    assert plan.rounds == 2


def test_where_a_prompt_ends_the_first_tokens_leave_at_once() -> None:
    plan = plan_step([70, 500], 0, prefill_chunk=256, limits=LIMITS)
    assert plan.prefill == (70, 128)
    assert plan.rounds == 1


def test_without_prompts_bursts_are_long() -> None:
    assert plan_step([], 3, prefill_chunk=256, limits=LIMITS).rounds == 8


@given(
    priming=st.lists(st.integers(1, 2000), max_size=5),
    decoding=st.integers(0, 8),
    tiles=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_shares_keep_to_the_budget_and_the_grid(priming: list[int], decoding: int, tiles: int) -> None:
    plan = plan_step(priming, decoding, prefill_chunk=64 * tiles, limits=LIMITS)
    assert sum(plan.prefill) <= 64 * tiles
    for share, left in zip(plan.prefill, priming, strict=True):
        assert share == left or share % 64 == 0
    assert not priming or plan.prefill[0] > 0, "the oldest always goes on"


@pytest.mark.parametrize(
    ("load", "verdict"),
    [
        (0, Speculation.ADMIT),
        (2, Speculation.ADMIT),
        (3, Speculation.HOLD),
        (4, Speculation.DEMOTE),
        (99, Speculation.DEMOTE),
    ],
)
def test_spec_gate_admits_up_to_low_and_demotes_from_high_on(load: int, verdict: Speculation) -> None:
    assert speculation(load, SpecGate(low=2, high=4)) is verdict
    assert speculation(load, None) is Speculation.ADMIT


@pytest.mark.parametrize(
    ("load", "gain", "verdict"),
    [
        (2, 0.1, Speculation.ADMIT),
        (3, None, Speculation.HOLD),
        (3, 1.2, Speculation.ADMIT),
        (4, None, Speculation.DEMOTE),
        (9, 0.9, Speculation.DEMOTE),
        (9, 1.05, Speculation.HOLD),
        (9, 1.2, Speculation.ADMIT),
    ],
)
def test_spec_gate_with_a_least_gain_lets_what_is_measured_decide_over_low(
    load: int, gain: float | None, verdict: Speculation
) -> None:
    assert speculation(load, SpecGate(low=2, high=4, least_gain=1.1), gain) is verdict


def test_spec_gate_without_a_least_gain_ignores_what_is_measured() -> None:
    assert speculation(9, SpecGate(low=2, high=4), 5.0) is Speculation.DEMOTE


def test_spec_gate_with_a_least_gain_that_does_not_pay_is_refused() -> None:
    with pytest.raises(EngineFault, match="does not pay"):
        SpecGate(least_gain=1.0)


@pytest.mark.parametrize(("low", "high"), [(2, 2), (3, 1), (0, 4)])
def test_spec_gate_without_hysteresis_is_refused(low: int, high: int) -> None:
    with pytest.raises(EngineFault):
        SpecGate(low=low, high=high)
