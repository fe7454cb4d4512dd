"""`burstline up --model` on a folder that cannot be served: the last line says which file, and why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from shared.config import POCKET


def test_a_broken_tokenizer_is_the_last_word_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(
        POCKET, folder, ignore=shutil.ignore_patterns("recipe", "block", "heldout", "results", "*.py")
    )
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["merges"].insert(0, ["no such", "tokens"])
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    ended = subprocess.run(
        [sys.executable, "-m", "services.cli", "up", "--model", str(folder)],
        env={**os.environ, "BURSTLINE_DATA_DIR": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1, ended.stderr
    assert lines[-1].startswith(
        "burstline: gateway ended while starting (exit code 1): the gateway cannot run: "
    )
    assert f"{folder / 'tokenizer.json'}: the tokenizers library refuses it: Token `no such`" in lines[-1]
    assert any(line.startswith("stopping ") for line in lines[:-1])
