"""Exit codes of `burstline prove`: 0 all equal, 1 a difference, 2 nothing could be measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services import cli
from services.gpu_worker.engine.sessions.base import Session
from services.prove import command, families, models
from services.prove import device as where
from services.prove.axes import AXES, Cell
from services.prove.report import Tally
from services.prove.shards import LEAST_CELLS

CELL = Cell(
    **(
        {axis: next(iter(values)) for axis, values in AXES.items()}
        | {"drafter": "mtp K=3", "rule": "few ids", "budget": "32 tokens", "cache": "hit at 64"}
    )
)


CELLS = [replace(CELL, way=way) for way in ("whole", "demoted", "parked and replayed")]


@pytest.fixture(autouse=True)
def _one_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "quick", lambda seed: CELLS)
    monkeypatch.setattr(families, "FAMILIES", {})


def test_0_and_a_file_when_all_is_equal(tmp_path: Path) -> None:
    file = tmp_path / "prove.json"
    answer = CliRunner().invoke(cli.app, ["prove", "--json", str(file)])
    assert answer.exit_code == 0, answer.output
    told = json.loads(file.read_text(encoding="utf-8"))
    assert told["command"] == "prove --quick --seed 1"
    assert told["results"]["cells"] == len(CELLS)
    assert all(bar["holds"] for bar in told["bars"])


def test_1_and_the_words_when_something_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take = Session.drain

    def late_fault(self: Session) -> list[object]:
        got: list[object] = list(take(self))
        return got[:-1] if self.request.speculation_k and len(got) > 1 else got

    monkeypatch.setattr(Session, "drain", late_fault)
    file = tmp_path / "prove.json"
    assert command.main(everything=False, seed=1, json_file=file) == 1
    told = json.loads(file.read_text(encoding="utf-8"))
    assert told["results"]["differences"]["tokens"] == len(CELLS)
    assert told["results"]["told"][0]["cell"]["drafter"] == "mtp K=3"


def test_2_without_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "POCKET", tmp_path)
    monkeypatch.setattr("services.prove.prompts.POCKET", tmp_path)
    monkeypatch.setattr(command, "quick", lambda seed: [replace(CELL, model="pocket")])
    models.pocket.cache_clear()
    try:
        assert command.main(everything=False, seed=1, json_file=None) == 2
    finally:
        models.pocket.cache_clear()


@pytest.mark.parametrize(
    ("device", "everything"), [("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)]
)
def test_a_card_gets_more_and_smaller_parts(
    monkeypatch: pytest.MonkeyPatch, device: str, everything: bool
) -> None:
    asked: dict[str, int] = {}

    def cut(cells: object, most: int, *, least: int, **_: object) -> list[object]:
        asked.update(most=most, least=least)
        return []

    monkeypatch.setattr(where, "_chosen", where.chosen())
    monkeypatch.setattr(command, "cut", cut)
    monkeypatch.setattr(command, "run", lambda shards: Tally())
    monkeypatch.setattr(command, "full", lambda seed: CELLS)
    command.main(everything=everything, seed=1, json_file=None, device=device)
    on_cpu = (command.FULL_SHARDS if everything else command.QUICK_SHARDS, LEAST_CELLS)
    on_card = (
        command.CARD_FULL_SHARDS if everything else command.CARD_QUICK_SHARDS,
        command.CARD_LEAST_CELLS,
    )
    assert (asked["most"], asked["least"]) == (on_cpu if device == "cpu" else on_card)
    assert on_card[0] > on_cpu[0]
    assert on_card[1] < on_cpu[1]
