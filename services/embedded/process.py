"""Child processes that cannot be lost: a pid file each, a parent-death signal, a bounded stop.

On Linux the kernel signals a child when the supervisor dies. Where that is missing, or when the machine's supervisor
was killed with its children spared, the next start finds them by pid file and command line and ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from services.embedded import guard
from services.embedded.accounts import Account
from services.embedded.faults import Cancelled, EmbeddedFault
from services.embedded.files import limit_log, private_folder, write_private
from services.embedded.waiting import Stop, never, until

GONE: Final = (psutil.NoSuchProcess, psutil.ZombieProcess)


@dataclass(frozen=True, kw_only=True)
class Command:
    """How a child is started and stopped.

    `marker` is an argument of the command line that no other program would have (a path in the data folder).
    """

    name: str
    arguments: tuple[str, ...]
    marker: str
    death_signal: signal.Signals
    account: Account | None = None
    environment: Mapping[str, str] | None = None
    cwd: str | None = None


class Child:
    """A running child and its pid file. `log_began`: how many bytes its log had before it."""

    def __init__(
        self, command: Command, process: subprocess.Popen[bytes], pid_file: Path, *, log_began: int
    ) -> None:
        self.command = command
        self.log_began = log_began
        self._process = process
        self._pid_file = pid_file

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative = killed by that signal."""
        return self._process.poll()

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def stop(self, *, ask: Sequence[signal.Signals], each_s: float, hurry: Stop = never) -> int:
        """Send the signals of `ask` in turn, waiting `each_s` seconds after each, then SIGKILL. Returns the exit code.

        `hurry` answering yes ends a wait early.
        """
        for number in ask:
            if not self.running:
                break
            self._process.send_signal(number)
            with contextlib.suppress(Cancelled):
                until(lambda: not self.running, timeout_s=each_s, stop=hurry)
        if self.running:
            self._process.kill()
        code = self._process.wait()
        self._pid_file.unlink(missing_ok=True)
        return code


def spawn(command: Command, *, run_folder: Path, log: Path) -> Child:
    """Start `command` in its own session, its output appended to `log`, its pid written under `run_folder`.

    Call it from the thread that lives as long as the child shall (see the package's docstring).
    """
    private_folder(run_folder)
    private_folder(log.parent)
    limit_log(log)
    log_began = log.stat().st_size if log.exists() else 0
    account = command.account or Account(uid=-1, gid=-1)
    launcher = [
        sys.executable, "-I", "-S", str(Path(guard.__file__)),
        str(os.getpid()), str(int(command.death_signal)), str(account.uid), str(account.gid), "--",
    ]  # fmt: skip
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        process = subprocess.Popen(
            [*launcher, *command.arguments],
            env=None if command.environment is None else dict(command.environment),
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which stops the rest in order
        )
    pid_file = run_folder / f"{command.name}.json"
    try:
        created = psutil.Process(process.pid).create_time()
        write_private(
            pid_file, json.dumps({"pid": process.pid, "created": created, "marker": command.marker})
        )
    except GONE:
        pass  # it ended at once: the caller sees the exit code
    except EmbeddedFault:
        process.kill()
        process.wait()
        raise
    return Child(command, process, pid_file, log_began=log_began)


def end_leftover(pid_file: Path, *, ask: signal.Signals, timeout_s: float) -> bool:
    """End the process that a dead supervisor's pid file names. True if there was one.

    A pid that now belongs to another program (other start time, or a command line without the marker) is left alone.
    """
    try:
        record = json.loads(pid_file.read_text(encoding="utf-8"))
        pid, created, marker = int(record["pid"]), float(record["created"]), str(record["marker"])
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        pid_file.unlink(missing_ok=True)
        return False
    process = _same_process(pid, created, marker)
    if process is not None:
        end(process, ask=ask, timeout_s=timeout_s)
    pid_file.unlink(missing_ok=True)
    return process is not None


def end(process: psutil.Process, *, ask: signal.Signals, timeout_s: float) -> None:
    """Ask a process that is not our child to end, then kill it."""
    try:
        process.send_signal(ask)
        if not until(lambda: not alive(process), timeout_s=timeout_s):
            process.kill()
            until(lambda: not alive(process), timeout_s=timeout_s)
    except GONE:
        return


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except GONE:
        return False


def _same_process(pid: int, created: float, marker: str) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - created) > 1.0 or not alive(process):
            return None
        return process if any(marker in argument for argument in process.cmdline()) else None
    except (*GONE, psutil.AccessDenied):
        return None
