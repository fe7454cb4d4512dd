"""`burstline demo` as `make demo` runs it: what it promises, its last line, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

TURN = {"prompt_tokens", "cached_tokens", "completion_tokens", "tokens_per_verify", "trace_id", "text"}


@pytest.fixture(scope="module")
def shown() -> Iterator[tuple[subprocess.CompletedProcess[str], Path]]:
    with tempfile.TemporaryDirectory(prefix="burstline-demo-") as root:
        folder = Path(root) / "demo"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("BURSTLINE_")}
        done = subprocess.run(
            [sys.executable, "-m", "services.cli", "demo", "--data-dir", str(folder)],
            env=inherited | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        yield done, folder


def test_it_holds_what_it_promises(shown: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = shown
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["turns"]) == 3
    assert all(set(turn) >= TURN for turn in told["turns"])
    assert told["turns"][0]["cached_tokens"] == 0
    assert told["spec_equals_plain"] is True
    assert told["other_tenant_cached_tokens"] == 0
    assert told["spans"] > 10
    assert told["seconds_to_first_answer"] > 0


def test_exactly_one_line_is_json(shown: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = shown
    assert [line for line in done.stdout.splitlines() if line.startswith("{")] == done.stdout.splitlines()[
        -1:
    ]


def test_it_leaves_no_process(shown: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = shown
    left = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in argument for argument in process.cmdline()):
                left.append(process.pid)
        except psutil.Error:
            continue
    assert left == []
    assert not list((folder / "run").iterdir())
