"""`burstline prove --quick` as it ships: no difference, and within its time on a quiet machine of two cores."""

from __future__ import annotations

import json
from pathlib import Path

from services.prove.axes import AXES
from services.prove.command import main


def test_c1_the_quick_matrix_shows_no_difference(tmp_path: Path) -> None:
    file = tmp_path / "prove.json"
    assert main(everything=False, seed=1, json_file=file) == 0
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert {axis: set(found) for axis, found in results["cells_by_value"].items()} == {
        axis: set(values) for axis, values in AXES.items()
    }
