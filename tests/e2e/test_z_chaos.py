"""A short run of `burstline chaos`: faults of every kind on a line of its own, and every promise kept (C2, C3, C6).

No time is asserted: how many faults come in a minute depends on the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 900


@pytest.mark.timeout(LIMIT_S + 60)
def test_c2_faults_of_every_kind_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    told = tmp_path / "chaos.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BURSTLINE_")}
    run = subprocess.run(
        [sys.executable, "-m", "services.cli", "chaos", "--minutes", "1", "--seed", "1", "--json", str(told)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-6000:]
    evidence = json.loads(told.read_text())
    assert all(bar["holds"] for bar in evidence["bars"])
    assert evidence["results"]["faults"]
    assert evidence["results"]["tokens_heard"] > 0
