"""`burstline prove --quick` as it ships: every value of every axis, and no difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.prove.axes import AXES
from services.prove.command import main


@pytest.mark.timeout(1200)  # about a minute of one core; a shared machine may take many times that
def test_c1_the_quick_matrix_shows_no_difference(tmp_path: Path) -> None:
    file = tmp_path / "prove.json"
    assert main(everything=False, seed=1, json_file=file) == 0
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert {axis: set(found) for axis, found in results["cells_by_value"].items()} == {
        axis: set(values) for axis, values in AXES.items()
    }
