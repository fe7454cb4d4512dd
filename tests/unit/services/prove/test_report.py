"""Counts, bars, and the shape of the evidence."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from services.gpu_worker.engine.events import SpecTelemetry
from services.prove.axes import AXES, Cell
from services.prove.compare import Difference, Verdict
from services.prove.evidence import evidence
from services.prove.report import MOST_TOLD, WITNESSES, Tally
from services.prove.stage import Outcome
from shared.evidence import Bar, write

CELL = Cell(**{axis: next(iter(values)) for axis, values in AXES.items()})
DIFFERENCE = Difference(
    cell=CELL, request_id="cell-1", kind="tokens", position=7, expected="1", got="2", logit_gap=0.5
)

HAPPENED = {event: 1 for _, event, _, _ in WITNESSES}


def outcome(cell: Cell = CELL, differences: int = 0, cached: int = 64) -> Outcome:
    return Outcome(
        cell=cell,
        verdict=Verdict(compared=Counter({"tokens": 10}), differences=[DIFFERENCE] * differences),
        telemetry=SpecTelemetry(rounds=4, drafted=6, accepted=4, drafted_at=(5, 1), accepted_at=(3, 1)),
        cached_tokens=cached,
    )


def test_counts_are_by_value() -> None:
    tally = Tally()
    tally.add(outcome())
    tally.add(outcome(replace(CELL, burst="7 rounds"), differences=1))
    results = tally.results()
    assert results["cells_by_value"]["burst"] == {"1 round": 1, "7 rounds": 1}
    assert results["comparisons"] == {"tokens": 20}
    assert (results["accepted_drafts"], results["rejected_drafts"]) == (8, 4)
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(tally.table())
    text = console.export_text()
    assert "7 rounds" in text
    assert "2 rounds" not in text


def test_all_differences_are_counted_and_few_are_told() -> None:
    tally = Tally()
    for _ in range(3):
        tally.add(outcome(differences=MOST_TOLD))
    assert tally.differences == 3 * MOST_TOLD
    assert len(tally.told) == MOST_TOLD
    assert json.loads(json.dumps(tally.results()))["told"][0]["logit_gap"] == 0.5


@pytest.mark.parametrize(
    ("outcomes", "happened", "broken"),
    [
        ([outcome()], HAPPENED, set()),
        ([outcome(differences=1)], HAPPENED, {"differences"}),
        ([outcome(cached=0)], HAPPENED, {"cells restored from the cache"}),
        ([], HAPPENED, {"accepted drafts", "rejected drafts", "cells restored from the cache"}),
        ([outcome()], {}, set()),
        ([outcome(replace(CELL, way="overshot"))], {}, {"streams that were made to overshoot"}),
        ([outcome(replace(CELL, way="parked and replayed"))], {}, {"streams set aside and replayed"}),
        ([outcome(replace(CELL, company="16 together"))], {}, {"greedy and sampled streams together"}),
    ],
)
def test_bars(outcomes: list[Outcome], happened: dict[str, int], broken: set[str]) -> None:
    tally = Tally()
    tally.happened.update(happened)
    for one in outcomes:
        tally.add(one)
    assert {bar.name for bar in tally.bars() if not bar.holds} == broken


def test_the_evidence_object_has_the_shape_of_the_design(tmp_path: Path) -> None:
    file = tmp_path / "new" / "prove.json"
    write(file, evidence("prove", {"cells": 1}, [Bar.at_most("differences", 1, 0, "differences")]))
    told = json.loads(file.read_text(encoding="utf-8"))
    assert set(told) == {"command", "version", "date", "device", "results", "bars"}
    assert told["bars"] == [
        {"name": "differences", "value": 1, "limit": 0, "unit": "differences", "holds": False}
    ]


@pytest.mark.parametrize(("drafted_at", "moved"), [((5, 1), 1), ((3, 1), 0), ((), 0)])
def test_a_draft_gate_moved_when_the_end_alone_does_not_explain_it(
    drafted_at: tuple[int, ...], moved: int
) -> None:
    tally = Tally()
    tally.add(replace(outcome(), telemetry=SpecTelemetry(rounds=6, drafted_at=drafted_at)))
    assert tally.happened["Draft gate moved"] == moved


def test_every_witness_is_of_a_value_that_exists() -> None:
    assert all(value in AXES[axis] for (axis, value), *_ in WITNESSES)
