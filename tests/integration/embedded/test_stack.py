"""The supervisor: clean stops, kills, two at once, crashes of children, folders and ports that will not do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from services.embedded import StackInfo, discover, ports
from services.embedded.process import alive
from services.embedded.waiting import until

PATIENCE_S = 120.0
STUB = Path(__file__).with_name("stub_stack.py")


@dataclass
class Run:
    """A supervisor process; its messages go to a file."""

    process: subprocess.Popen[bytes]
    folder: Path
    messages: Path

    def said(self) -> str:
        return self.messages.read_text()

    def up(self) -> StackInfo:
        """Wait until the stack has announced itself."""
        assert until(
            lambda: self.process.poll() is not None or self._info() is not None, timeout_s=PATIENCE_S
        )
        info = self._info()
        assert info is not None, self.said()
        return info

    def ended(self) -> int:
        return self.process.wait(timeout=PATIENCE_S)

    def stopped_by(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.ended()

    def _info(self) -> StackInfo | None:
        info = discover(self.folder)
        return info if info is not None and info.pids["stack"] == self.process.pid else None


Start = Callable[..., Run]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="burstline-stack-") as path:
        yield Path(path) / "data"


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a supervisor on `folder`; none outlives the test."""
    runs: list[Run] = []

    def begin(*arguments: str, **variables: str) -> Run:
        messages = tmp_path / f"messages-{len(runs)}"
        base = {name: value for name, value in os.environ.items() if not name.startswith("BURSTLINE_")}
        settings = {
            "BURSTLINE_DATA_DIR": str(folder),
            "BURSTLINE_EMBEDDED_GATEWAY_PORT": "0",
            "BURSTLINE_EMBEDDED_DURABLE": "false",
            "BURSTLINE_EMBEDDED_RESTART_BACKOFF_S": "0.1",
        }
        with messages.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(STUB), *arguments],
                env=base | settings | variables,
                stdout=output,
                stderr=output,
            )
        runs.append(Run(process, folder, messages))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def processes(info: StackInfo) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in info.pids.values()]


def all_gone(family: list[psutil.Process]) -> bool:
    return until(lambda: not any(map(alive, family)), timeout_s=PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_everything_in_order(start: Start, folder: Path, number: signal.Signals) -> None:
    run = start()
    family = processes(run.up())
    assert len(family) == 6
    assert run.stopped_by(number) == 0
    assert all_gone(family)
    said = run.said()
    assert said.index("stopping gateway") < said.index("stopping worker") < said.index("stopping broker")
    assert discover(folder) is None
    assert not list((folder / "run").iterdir())


def test_a_killed_supervisor_takes_all_along_and_the_next_start_works(start: Start, folder: Path) -> None:
    run = start()
    family = processes(run.up())
    run.stopped_by(signal.SIGKILL)
    if sys.platform == "linux":
        assert all_gone(family)
    assert discover(folder) is None
    again = start()
    assert again.up().pids["stack"] == again.process.pid
    assert all_gone(family)
    assert again.stopped_by(signal.SIGTERM) == 0


def test_two_on_one_folder_refuse_the_second(start: Start) -> None:
    first = start()
    info = first.up()
    second = start()
    assert second.ended() == 1
    assert f"already runs on {first.folder} (process {first.process.pid})" in second.said()
    assert all(map(alive, processes(info)))


@pytest.mark.parametrize("name", ["worker", "gateway", "broker", "nats", "postgres"])
def test_a_crashed_child_comes_back_and_is_announced(start: Start, folder: Path, name: str) -> None:
    run = start()
    before = run.up()
    os.kill(before.pids[name], signal.SIGKILL)

    def replaced() -> bool:
        info = discover(folder)
        return info is not None and info.pids[name] != before.pids[name]

    assert until(lambda: run.process.poll() is not None or replaced(), timeout_s=PATIENCE_S)
    after = run.up()
    assert after.pids[name] != before.pids[name], run.said()
    assert {key: pid for key, pid in after.pids.items() if key != name} == {
        key: pid for key, pid in before.pids.items() if key != name
    }
    assert (after.nats_url, after.database_url) == (before.nats_url, before.database_url)
    assert run.stopped_by(signal.SIGTERM) == 0


def test_a_child_that_crashes_again_and_again_ends_the_stack(start: Start, folder: Path) -> None:
    run = start(BURSTLINE_EMBEDDED_RESTART_LIMIT="1")
    first = run.up()
    family = processes(first)
    os.kill(first.pids["worker"], signal.SIGKILL)

    def second() -> int | None:
        info = discover(folder)
        return None if info is None or info.pids["worker"] == first.pids["worker"] else info.pids["worker"]

    assert until(lambda: second() is not None, timeout_s=PATIENCE_S)
    pid = second()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert run.ended() == 1
    assert "worker ended (killed by SIGKILL) after 1 restarts: giving up" in run.said()
    assert all_gone(family)


def test_a_service_that_cannot_start_shows_its_log_and_stops_the_rest(start: Start, folder: Path) -> None:
    run = start("broker")
    assert run.ended() == 1
    assert "broker ended while starting (exit code 1)" in run.said()
    assert "no such setting" in run.said()
    assert not list((folder / "run").iterdir())


def test_a_port_that_the_user_chose_and_another_has_is_named(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind((ports.LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = start(BURSTLINE_EMBEDDED_GATEWAY_PORT=str(port))
        assert run.ended() == 1
        assert f"port {port} is taken" in run.said()
        assert "BURSTLINE_EMBEDDED_GATEWAY_PORT" in run.said()


def test_servers_of_the_user_replace_the_embedded_ones(
    start: Start, nats_url: str, database_url: str
) -> None:
    run = start(BURSTLINE_NATS_URL=nats_url, BURSTLINE_DATABASE_URL=database_url)
    info = run.up()
    assert set(info.pids) == {"stack", "gateway", "worker", "broker"}
    assert (info.nats_url, info.database_url) == (nats_url, database_url)
    assert run.stopped_by(signal.SIGTERM) == 0


def test_an_unknown_setting_is_named_with_a_hint(start: Start) -> None:
    run = start(BURSTLINE_EMBEDDED_GATEWAY_PROT="1")
    assert run.ended() == 2
    assert "did you mean BURSTLINE_EMBEDDED_GATEWAY_PORT?" in run.said()


def test_a_data_folder_that_is_a_file_is_named(start: Start, folder: Path) -> None:
    folder.write_text("")
    run = start()
    assert run.ended() == 1
    assert f"cannot make the folder {folder}" in run.said()


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Callable[[str], None]]:
    """Mount a tmpfs on the data folder with the given options; needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")

    def mount(options: str) -> None:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("this system does not let us mount a tmpfs")

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


def test_a_full_disk_is_told_before_anything_starts(
    start: Start, folder: Path, small_disk: Callable[[str], None]
) -> None:
    small_disk("size=8m")
    run = start()
    assert run.ended() == 1
    assert f"MiB are free at {folder}" in run.said()
    assert not list(folder.iterdir())


def test_a_read_only_folder_is_told(start: Start, folder: Path, small_disk: Callable[[str], None]) -> None:
    small_disk("size=4g,ro")
    run = start()
    assert run.ended() == 1
    assert f"cannot write {folder}/stack.lock: Read-only file system" in run.said()
