"""The script of faults: launches are counted by stream, demotions by rounds, and nothing happens unasked."""

from __future__ import annotations

import pytest

from services.gpu_worker.engine.faults import OutOfMemory
from services.prove.script import Script

ONE, OTHER = ("one", 0), ("other", 0)


def test_an_empty_script_changes_nothing() -> None:
    script = Script()
    for _ in range(5):
        script.launched("verify", [ONE, OTHER])
    assert not script.demote(ONE, 100)


def test_the_named_launches_of_a_stream_fail_whatever_their_phase() -> None:
    script = Script()
    script.fail_launches(ONE, [3, 1])
    failed = []
    for number, phase in enumerate(("prefill", "prefill", "verify", "verify"), start=1):
        script.launched(phase, [OTHER])  # type: ignore[arg-type]
        try:
            script.launched(phase, [OTHER, ONE])  # type: ignore[arg-type]
        except OutOfMemory:
            failed.append(number)
    assert failed == [1, 3]


def test_every_stream_of_a_launch_is_counted_though_it_fails_for_one() -> None:
    script = Script()
    script.fail_launches(ONE, [1])
    script.fail_launches(OTHER, [2])
    with pytest.raises(OutOfMemory):
        script.launched("verify", [ONE, OTHER])
    with pytest.raises(OutOfMemory):
        script.launched("verify", [OTHER])


def test_demotion_comes_from_its_round_on() -> None:
    script = Script()
    script.demote_after(ONE, 2)
    assert [script.demote(ONE, rounds) for rounds in range(4)] == [False, False, True, True]
    assert not script.demote(OTHER, 9)
    script.clear()
    assert not script.demote(ONE, 9)


def test_a_stream_gives_way_once_for_each_of_its_rows() -> None:
    script = Script()
    script.give_way_at(ONE, [70, 5])
    assert [script.give_way(ONE, rows) for rows in (4, 64, 64, 69, 80, 90)] == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert not script.give_way(OTHER, 99)
    script.give_way_at(ONE, [1])
    script.clear()
    assert not script.give_way(ONE, 9)


def test_only_the_named_stream_overshoots() -> None:
    script = Script()
    script.overshoot_by(ONE, 3)
    assert (script.overshoot(ONE), script.overshoot(OTHER)) == (3, 0)
    script.clear()
    assert script.overshoot(ONE) == 0
