"""scripts/setup with stand-ins for Python, pip and df: what a user on a bare machine is told, and what a second run does."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "dirname", "awk", "cksum", "tr", "rm", "mkdir", "cp", "pwd", "cat", "chmod")
PYTHON = """#!/bin/sh
case "$*" in
    *version_info*) exit "${FAKE_OLD:-0}" ;;
    *ensurepip*) exit "${FAKE_NO_VENV:-0}" ;;
    --version) echo "Python 3.9.2" ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo venv >>calls ;;
    "-m pip --version") exit "${FAKE_NO_PIP:-0}" ;;
    "-m pip install"*)
        echo "pip $*" >>calls
        echo "Collecting torch==2.13.0"
        echo "  Downloading https://index/torch-2.13.0-cp311-none-any.whl.metadata (29 kB)"
        echo "  Downloading torch-2.13.0-cp311-none-any.whl (865.3 MB)"
        [ -z "${FAKE_PIP:-}" ] || { echo "ERROR: no such thing" >&2 && exit "$FAKE_PIP"; }
        echo "Installing collected packages: mpmath, torch, burstline" ;;
    *) echo "unexpected: $*" >&2 && exit 99 ;;
esac
"""
DF = """#!/bin/sh
echo header
echo "/dev/x 100 1 ${FAKE_FREE_KIB:-99999999} 1% /"
"""


@dataclass
class Machine:
    """A tree with the script in it, and a PATH that holds only what we put there."""

    tree: Path
    path: Path
    environment: dict[str, str] = field(default_factory=dict)

    def setup(self, extra: str, **fakes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/sh", "scripts/setup", extra],
            cwd=self.tree,
            env={"PATH": str(self.path), **fakes},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """What was made and installed, in order."""
        file = self.tree / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    tree, path = tmp_path / "tree", tmp_path / "bin"
    (tree / "scripts").mkdir(parents=True)
    path.mkdir()
    shutil.copy(ROOT / "scripts" / "setup", tree / "scripts")
    (tree / "pyproject.toml").write_text("one")
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (path / tool).symlink_to(found)
    for name, text in (("python3", PYTHON), ("df", DF)):
        (path / name).write_text(text)
        (path / name).chmod(0o755)
    return Machine(tree, path)


def test_the_second_run_does_nothing(machine: Machine) -> None:
    assert machine.setup("demo").returncode == 0
    first = machine.calls()
    assert [call.split()[0] for call in first] == ["venv", "pip"]
    assert first[1].endswith("-e .[demo]")
    assert machine.setup("demo").returncode == 0
    assert machine.calls() == first


def test_dev_holds_demo_but_not_the_other_way(machine: Machine) -> None:
    machine.setup("demo")
    machine.setup("dev")
    assert machine.calls()[-1].endswith("-e .[dev]")
    before = machine.calls()
    machine.setup("demo")
    assert machine.calls() == before


def test_a_changed_build_file_is_installed_again_into_the_same_environment(machine: Machine) -> None:
    machine.setup("demo")
    (machine.tree / "pyproject.toml").write_text("two")
    machine.setup("demo")
    assert [call.split()[0] for call in machine.calls()] == ["venv", "pip", "pip"]


def test_an_install_that_failed_is_said_and_done_again(machine: Machine) -> None:
    failed = machine.setup("demo", FAKE_PIP="1")
    assert failed.returncode == 1
    assert "the install did not finish" in failed.stderr
    assert "ERROR: no such thing" in failed.stderr, "pip's own reason"
    assert machine.setup("demo").returncode == 0
    assert [call.split()[0] for call in machine.calls()] == ["venv", "pip", "pip"]


def test_of_pips_lines_a_person_sees_what_is_large_and_the_rest_is_in_the_log(machine: Machine) -> None:
    done = machine.setup("demo")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2:] == [
        "  fetching torch-2.13.0-cp311-none-any.whl (865.3 MB)",
        "  installing ...",
    ]
    assert "Collecting torch==2.13.0" in (machine.tree / ".venv" / "install.log").read_text()


def test_an_environment_that_was_killed_while_it_was_made_is_made_again(machine: Machine) -> None:
    (machine.tree / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(machine.path / "python3", machine.tree / ".venv" / "bin" / "python")
    machine.setup("demo", FAKE_NO_PIP="1")
    assert machine.calls()[0] == "venv"


@pytest.mark.parametrize(
    ("fakes", "words"),
    [
        ({"FAKE_OLD": "1"}, "needs Python 3.11 or newer; found Python 3.9.2"),
        ({"PYTHON": "no-such-python"}, "PYTHON=no-such-python is not a Python 3.11 or newer"),
        ({"FAKE_NO_VENV": "1"}, "has no venv module"),
        ({"FAKE_FREE_KIB": "1048576"}, "needs 3 GiB of free disk for its packages"),
    ],
    ids=["old-python", "wrong-python", "no-venv", "no-disk"],
)
def test_what_is_missing_is_said_before_anything_is_made(
    machine: Machine, fakes: dict[str, str], words: str
) -> None:
    refused = machine.setup("demo", **fakes)
    assert refused.returncode == 1
    assert words in refused.stderr
    assert machine.calls() == []
