"""Which fault comes when is a function of the seed."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.chaos.schedule import Fault, Kind, chosen, faults


def _take(seed: int, kinds: tuple[Kind, ...], count: int) -> list[Fault]:
    return list(islice(faults(seed, kinds, every_s=4.0, ack_wait_s=3.0), count))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1 << 32), kinds=st.sets(st.sampled_from(list(Kind)), min_size=1))
def test_the_schedule_is_a_function_of_the_seed_and_every_round_has_every_kind(
    seed: int, kinds: set[Kind]
) -> None:
    given_order, other_order = tuple(kinds), tuple(sorted(kinds, reverse=True))
    planned = _take(seed, given_order, 3 * len(kinds))
    assert planned == _take(seed, other_order, 3 * len(kinds))
    assert [fault.number for fault in planned] == list(range(1, len(planned) + 1))
    for start in range(0, len(planned), len(kinds)):
        assert {fault.kind for fault in planned[start : start + len(kinds)]} == kinds


def test_another_seed_is_another_schedule() -> None:
    assert _take(1, tuple(Kind), 20) != _take(2, tuple(Kind), 20)


def test_a_stopped_worker_is_stopped_beyond_its_claims() -> None:
    stops = _take(5, (Kind.WORKER_STOP,), 20)
    assert all(fault.hold_s > 3.0 for fault in stops)
    assert all(fault.hold_s == 0 for fault in _take(5, (Kind.WORKER_KILL,), 20))


def test_no_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a kind"):
        next(faults(1, (), every_s=1.0, ack_wait_s=1.0))


def test_an_unknown_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(None) == tuple(Kind)
    assert chosen(["nats-cut"]) == (Kind.NATS_CUT,)
    with pytest.raises(SystemExit):
        chosen(["nats-cat"])
    assert "--kind nats-cat is none of worker-kill," in capsys.readouterr().err
