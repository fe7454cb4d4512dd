"""A supervised child: started, asked whether it is ready, restarted within limits, drained."""

from __future__ import annotations

import http.client
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from services.embedded.faults import Cancelled, EmbeddedFault
from services.embedded.files import tail
from services.embedded.ports import LOOPBACK
from services.embedded.process import Child, Command, spawn
from services.embedded.restarts import RestartPolicy
from services.embedded.waiting import Stop, never
from shared.clock import SYSTEM, Clock
from shared.logs import last_word

PROBE_TIMEOUT_S: Final = 3.0

Report = Callable[[str], None]


class Startable(Protocol):
    """What can be supervised: a server with its own start-up, or a service."""

    @property
    def child(self) -> Child | None: ...

    @property
    def log(self) -> Path: ...

    def start(self) -> None: ...


def said(target: Startable) -> str:
    """The end of what its present process wrote to its log."""
    return tail(target.log, began=target.child.log_began if target.child is not None else 0)


def why(target: Startable) -> str:
    """Why it ended, as the rest of a sentence: in one line if it said so itself, else with the end of its log."""
    text = said(target)
    word = last_word(text)
    return f": {word}. Its log: {target.log}" if word is not None else f". The end of {target.log}:\n{text}"


class Service:
    """One of our own services as a process. Ready = its health endpoint says so."""

    def __init__(self, command: Command, *, port: int, run_folder: Path, log: Path) -> None:
        self.name = command.name
        self.port = port
        self._command = command
        self._run_folder = run_folder
        self._log = log
        self._child: Child | None = None

    @property
    def child(self) -> Child | None:
        return self._child

    @property
    def log(self) -> Path:
        return self._log

    def start(self) -> None:
        """Start the process. Does not wait until it is ready."""
        self._child = spawn(self._command, run_folder=self._run_folder, log=self._log)

    def ready(self) -> bool:
        """Whether /readyz answers 200 now."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self, *, timeout_s: float, hurry: Stop = never) -> None:
        """SIGTERM and wait for the drain, then SIGKILL. Idempotent."""
        if self._child is not None:
            self._child.stop(ask=[signal.SIGTERM], each_s=timeout_s, hurry=hurry)
            self._child = None


class Keeper:
    """Keeps one child running. `tick` is called now and then; it never blocks but for a server's own start."""

    def __init__(
        self, name: str, target: Startable, policy: RestartPolicy, report: Report, clock: Clock = SYSTEM
    ) -> None:
        self._name = name
        self._target = target
        self._policy = policy
        self._report = report
        self._clock = clock
        self._restarts: tuple[int, ...] = ()
        self._due_ns: int | None = None

    def tick(self) -> bool:
        """Restart the child if it crashed and its delay is over. True when a new process was started.

        Raises:
            EmbeddedFault: it crashed, or could not be started again, too often; the message says how it ended last.
            Cancelled: asked to stop while it was being started.
        """
        now = self._clock.monotonic_ns()
        if self._due_ns is None:
            child = self._target.child
            if child is None or child.running:
                return False
            self._due_ns = self._plan(f"ended ({describe(child.exit_code)})", why(self._target), now)
        if now < self._due_ns:
            return False
        self._restarts = (*self._policy.recent(self._restarts, now), now)
        try:
            self._target.start()
        except Cancelled:
            raise
        except EmbeddedFault as fault:  # a full disk, say: as passing as the crash itself
            detail = f". {fault.message}:\n{tail(self._target.log)}"
            self._due_ns = self._plan("could not be started", detail, self._clock.monotonic_ns())
            return False
        self._due_ns = None
        return True

    def _plan(self, what: str, detail: str, now: int) -> int:
        """When to start it again; raises EmbeddedFault, which goes on with `detail`, when it was too often."""
        delay_s = self._policy.decide(self._restarts, now)
        if delay_s is None:
            raise EmbeddedFault(
                f"{self._name} {what} after {len(self._restarts)} restarts: giving up{detail}"
            )
        self._report(f"{self._name} {what}; restarting in {delay_s:g} s")
        return now + int(delay_s * 1e9)


def describe(exit_code: int | None) -> str:
    """An exit code in words."""
    if exit_code is None:
        return "running"
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"
