"""Children: pid files, leftovers, a bounded stop, death with the parent."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.embedded.process import Child, Command, alive, end_leftover, spawn
from services.embedded.waiting import until

SLEEPER = "import signal, sys, time\nprint('up', flush=True)\ntime.sleep(600)\n"
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)\n"


def command(code: str, marker: Path, death_signal: signal.Signals = signal.SIGKILL) -> Command:
    return Command(
        name="child",
        arguments=(sys.executable, "-S", "-c", code, str(marker)),
        marker=str(marker),
        death_signal=death_signal,
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[list[Child]]:
    """Children that the test starts; none outlives it."""
    children: list[Child] = []
    yield children
    for child in children:
        child.stop(ask=[], each_s=0)


def launch(code: str, folder: Path, children: list[Child]) -> Child:
    log = folder / "child.log"
    child = spawn(command(code, folder), run_folder=folder / "run", log=log)
    children.append(child)
    assert until(lambda: b"up" in log.read_bytes(), timeout_s=60)
    return child


def test_a_child_knows_where_its_part_of_the_log_begins(tmp_path: Path, start: list[Child]) -> None:
    assert launch(SLEEPER, tmp_path, start).log_began == 0
    assert launch(SLEEPER, tmp_path, start).log_began == len("up\n")


def test_stop_asks_then_kills(tmp_path: Path, start: list[Child]) -> None:
    polite = launch(SLEEPER, tmp_path, start)
    assert polite.stop(ask=[signal.SIGTERM], each_s=30) == -signal.SIGTERM
    stubborn = launch(STUBBORN, tmp_path / "b", start)
    assert stubborn.stop(ask=[signal.SIGTERM], each_s=0.2) == -signal.SIGKILL
    assert not list((tmp_path / "run").iterdir())


def test_hurry_ends_the_wait_for_a_drain(tmp_path: Path, start: list[Child]) -> None:
    stubborn = launch(STUBBORN, tmp_path, start)
    assert stubborn.stop(ask=[signal.SIGTERM], each_s=200, hurry=lambda: True) == -signal.SIGKILL


def test_a_leftover_is_ended_by_its_pid_file(tmp_path: Path, start: list[Child]) -> None:
    child = launch(SLEEPER, tmp_path, start)
    pid_file = tmp_path / "run" / "child.json"
    assert end_leftover(pid_file, ask=signal.SIGTERM, timeout_s=30)
    assert until(lambda: not child.running, timeout_s=30)
    assert not pid_file.exists()
    assert not end_leftover(pid_file, ask=signal.SIGTERM, timeout_s=30)


def test_a_reused_pid_is_left_alone(tmp_path: Path, start: list[Child]) -> None:
    child = launch(SLEEPER, tmp_path, start)
    pid_file = tmp_path / "run" / "child.json"
    record = json.loads(pid_file.read_text())
    for wrong in ({"created": record["created"] - 100}, {"marker": "/somewhere/else"}):
        pid_file.write_text(json.dumps(record | wrong))
        assert not end_leftover(pid_file, ask=signal.SIGKILL, timeout_s=30)
        assert child.running


@pytest.mark.parametrize("text", ["", "x", "{}", '{"pid": "a"}'])
def test_a_broken_pid_file_is_removed(tmp_path: Path, text: str) -> None:
    pid_file = tmp_path / "x.json"
    pid_file.write_text(text)
    assert not end_leftover(pid_file, ask=signal.SIGKILL, timeout_s=1)
    assert not pid_file.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    """A supervisor killed with -9 takes its children along."""
    supervisor = f"""
import signal, sys, time
from pathlib import Path
from services.embedded.process import Command, spawn
folder = Path({str(tmp_path)!r})
child = spawn(
    Command(name="child", arguments=(sys.executable, "-S", "-c", {SLEEPER!r}, str(folder)), marker=str(folder),
            death_signal=signal.SIGKILL),
    run_folder=folder / "run", log=folder / "child.log")
print(child.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        log = tmp_path / "child.log"
        assert until(lambda: b"up" in log.read_bytes(), timeout_s=60)
        parent.kill()
        parent.wait()
    assert until(lambda: not alive(child), timeout_s=30)
