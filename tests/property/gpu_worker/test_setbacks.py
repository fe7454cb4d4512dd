"""Rests of lanes at fault: each by its own faults alone, bounded in length and in number."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.setbacks import FIRST_S, LONGEST_S, MOST, Setbacks
from shared.clock import ManualClock
from shared.outage import Outage

LANES = [f"req.f.normal.{number}" for number in range(4)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("failed"), st.sampled_from(LANES)),
        st.tuples(st.just("worked"), st.sampled_from(LANES)),
        st.tuples(st.sampled_from(["0.1", "0.7", "5", "20"]), st.just("")),
    ),
    max_size=60,
)


def _setbacks(clock: ManualClock) -> Setbacks:
    return Setbacks(Outage(logging.getLogger(__name__), "pulls", clock=clock), clock)


@settings(deadline=None, max_examples=100)
@given(steps=STEPS)
def test_fr_102_a_lane_rests_for_its_own_faults_alone(steps: list[tuple[str, str]]) -> None:
    """All lanes in one book, against a book of each lane's own; and none rests for longer than the longest rest."""
    clock = ManualClock()
    together, alone = _setbacks(clock), {lane: _setbacks(clock) for lane in LANES}
    for what, lane in steps:
        if what == "failed":
            together.failed(lane, "unavailable")
            alone[lane].failed(lane, "unavailable")
        elif what == "worked":
            together.worked(lane)
            alone[lane].worked(lane)
        else:
            clock.advance(float(what))
        assert {one for one in LANES if together.resting(one)} == {
            one for one in LANES if alone[one].resting(one)
        }
    clock.advance(LONGEST_S)
    assert not any(together.resting(lane) for lane in LANES)


@settings(deadline=None, max_examples=20)
@given(faults=st.integers(1, 12))
def test_rests_double_up_to_the_longest_and_begin_anew_after_a_pull_that_works(faults: int) -> None:
    clock = ManualClock()
    setbacks = _setbacks(clock)
    for number in range(faults):
        setbacks.failed(LANES[0], "unavailable")
        rest_s = min(FIRST_S * 2**number, LONGEST_S)
        clock.advance(rest_s - 0.001)
        assert setbacks.resting(LANES[0])
        clock.advance(0.001)
        assert not setbacks.resting(LANES[0])
    setbacks.worked(LANES[0])
    setbacks.failed(LANES[0], "unavailable")
    clock.advance(FIRST_S)
    assert not setbacks.resting(LANES[0])


def test_tenants_that_come_fail_and_go_leave_nothing_that_grows() -> None:
    clock = ManualClock()
    setbacks = _setbacks(clock)
    for number in range(3 * MOST):
        setbacks.failed(f"lane{number}", "unavailable")
        assert len(setbacks) <= MOST
    assert setbacks.resting(f"lane{3 * MOST - 1}")
    clock.advance(3600)
    setbacks.failed("last", "unavailable")
    assert len(setbacks) == 1


def test_fr_102_the_first_lane_at_fault_is_told_and_the_next_after_all_were_sound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    setbacks = _setbacks(clock)
    with caplog.at_level("INFO"):
        for lane in LANES:
            setbacks.failed(lane, "unavailable")
        for lane in LANES[1:]:
            setbacks.worked(lane)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert LANES[0] in caplog.text
        setbacks.worked(LANES[0])
        setbacks.failed(LANES[1], "unavailable")
        clock.advance(3600)  # its tenant went
        setbacks.failed(LANES[2], "unavailable")
    assert [record.levelname for record in caplog.records] == [
        *("WARNING", "INFO"),
        *("WARNING", "INFO"),
        "WARNING",
    ]
