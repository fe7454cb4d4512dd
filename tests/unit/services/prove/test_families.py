"""Trials of families: counted beside the cells, told in the table, and a crash of one is a difference of it alone."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from services.prove import command, families
from services.prove.compare import Verdict
from services.prove.families import Trial, TrialOutcome, attempt, dealt, trials
from services.prove.report import Tally

GOOD = Trial(name="good", run=lambda: Verdict(compared=Counter({"tokens": 3})))


def _broken() -> Verdict:
    raise ZeroDivisionError("by a fault")


BROKEN = Trial(name="broken", run=_broken)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"claim": lambda everything, seed: [GOOD] * (3 if everything else 1)}
    monkeypatch.setattr(families, "FAMILIES", made)
    monkeypatch.setattr("services.prove.report.FAMILIES", made)


def test_every_familys_trials_are_asked_for() -> None:
    assert [name for name, _ in trials(False, 1)] == ["claim"]
    assert len(trials(True, 1)) == 3


def test_what_shares_references_is_run_in_one_part_and_every_trial_in_one() -> None:
    asked = [
        (family, replace(GOOD, name=f"{family} {number}", shares=f"{number % 3}" if number < 6 else ""))
        for family in ("one", "other")
        for number in range(8)
    ]
    parts = [dealt(asked, number, 4) for number in range(4)]
    assert sorted(name for part in parts for name in map(str, part)) == sorted(map(str, asked))
    for family in ("one", "other"):
        for shared in "012":
            assert sum((family, shared) in {(f, t.shares) for f, t in part} for part in parts) == 1
    assert max(map(len, parts)) <= 6


def test_a_trial_that_breaks_is_a_difference_and_says_which() -> None:
    (difference,) = attempt("claim", BROKEN).verdict.differences
    assert (difference.kind, difference.cell) == ("engine", "claim: broken")
    assert "by a fault" in difference.got


def test_trials_are_counted_and_shown() -> None:
    tally = Tally()
    tally.add_trial(attempt("claim", GOOD))
    tally.add_trial(attempt("claim", BROKEN))
    assert (tally.cells, tally.trials, tally.differences) == (0, 2, 1)
    results = json.loads(json.dumps(tally.results()))
    assert results["trials_by_family"] == {"claim": 2}
    assert results["told"][0]["cell"] == "claim: broken"
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(tally.table())
    assert "claim" in console.export_text()


def test_the_command_runs_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "quick", lambda seed: [])
    file = tmp_path / "prove.json"
    command.main(everything=False, seed=1, json_file=file)
    told = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert told["trials_by_family"] == {"claim": 1}
    assert told["comparisons"] == {"tokens": 3}


def test_an_outcome_names_its_family() -> None:
    assert attempt("claim", GOOD) == TrialOutcome(family="claim", verdict=GOOD.run())
