"""Device kernels hold what triton asks of types and layouts on a card, in bfloat16: what the interpreter does not look at."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

LAUNCH = re.compile(r"^\s*(?:\w+ = )?(?:\w+\.)?(\w+)\[(?:grid|\(.*)\]\($", re.MULTILINE)


def test_every_kernel_is_translated_for_a_card() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.typed"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert not told["broken"]
    assert {name: faults for name, faults in told["kernels"].items() if faults} == {}
    assert set(told["kernels"]) == launched()


def launched() -> set[str]:
    """Names of the kernels that launchers of the package start."""
    sources = (path.read_text() for path in (ROOT / "kernels").rglob("*.py") if "gate" not in path.parts)
    return {name for source in sources for name in LAUNCH.findall(source)}


def test_launches_are_found() -> None:
    assert {"stream_kernel", "_step_kernel", "_split_kernel", "_advance"} <= launched()
