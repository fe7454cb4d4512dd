"""A run on a card that is cut off leaves what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.bench.card_record import Record
from shared.evidence import Bar

GOOD, BAD = Bar.at_most("step", 1, 2, "ms"), Bar.at_most("step", 3, 2, "ms")


def record(file: Path | None, *, promised: bool = True) -> Record:
    return Record(
        "bench decode", file, {"shape": "27b"}, promised=promised, device=lambda: {"name": "a card"}
    )


def read(file: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return told


def test_every_row_is_in_the_file_as_soon_as_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "new" / "decode.json"
    run = record(file)
    row = run.rows("steps")
    row("1 x 1", {"round_ms": 1.0})
    first = read(file)
    row("8 x 1", {"round_ms": 2.0})
    run.hold([GOOD])
    second = read(file)

    assert first["results"] == {"shape": "27b", "steps": {"1 x 1": {"round_ms": 1.0}}}
    assert list(second["results"]["steps"]) == ["1 x 1", "8 x 1"]
    assert [bar["holds"] for bar in second["bars"]] == [True]
    assert first["complete"] is second["complete"] is False
    assert first["device"] == {"name": "a card"}


def test_only_a_run_that_ended_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "decode.json")
    run.hold([GOOD, BAD])

    assert not run.end()
    assert read(tmp_path / "decode.json")["complete"] is True
    assert [file.name for file in tmp_path.iterdir()] == ["decode.json"]
    assert capsys.readouterr().out.endswith("NOT AS PROMISED: 1 of 2 figures\n")


def test_a_shape_that_nothing_is_promised_of_has_no_bars(tmp_path: Path) -> None:
    run = record(tmp_path / "decode.json", promised=False)
    run.hold([BAD])

    assert run.end()
    assert read(tmp_path / "decode.json")["bars"] == []


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = record(None)
    run.rows("steps")("1 x 1", {"round_ms": 1.0})

    assert run.end()
    assert not list(tmp_path.iterdir())
