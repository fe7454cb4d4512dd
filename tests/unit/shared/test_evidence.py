"""The one shape of what commands write by `--json`."""

from __future__ import annotations

import json
from pathlib import Path

from shared.clock import ManualClock
from shared.evidence import Bar, evidence, told, write


def test_the_object_has_the_shape_of_the_design(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "told.json"
    bars = [Bar.at_most("differences", 1, 0, "differences")]
    write(file, evidence("prove", {"cells": 1}, bars, device={"name": "a cpu"}, clock=ManualClock()))
    told = json.loads(file.read_text(encoding="utf-8"))
    assert told.pop("version")
    assert told == {
        "command": "prove",
        "date": "2025-06-15T15:06:40+00:00",
        "device": {"name": "a cpu"},
        "results": {"cells": 1},
        "bars": [{"name": "differences", "value": 1, "limit": 0, "unit": "differences", "holds": False}],
    }


def test_a_command_that_computes_nothing_still_names_the_machine() -> None:
    assert evidence("audit", {}, ())["device"]["name"]


def test_bars_hold_on_their_good_side_and_at_the_limit() -> None:
    assert [Bar.at_most("x", value, 2, "s").holds for value in (1, 2, 3)] == [True, True, False]
    assert [Bar.at_least("x", value, 2, "s").holds for value in (1, 2, 3)] == [False, True, True]
    assert [Bar.zero("x", value, "bytes").holds for value in (-1, 0, 1)] == [False, True, False]


def test_bars_are_told_with_a_verdict() -> None:
    good, bad = Bar.at_most("bytes", 1_158_400, 2_000_000, "bytes"), Bar.at_most("wait", 4.25, 4, "s")
    assert told([good]) == ["bytes: 1,158,400 bytes", "As promised: 1 of 1 figures"]
    assert told([good, bad])[1:] == [
        "wait: 4.25 s  NOT AS PROMISED, limit 4",
        "NOT AS PROMISED: 1 of 2 figures",
    ]
    assert told([]) == []
