"""Keeper: what ended is started again, what cannot be started is tried again, both within one limit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.embedded.children import Keeper
from services.embedded.faults import Cancelled, EmbeddedFault
from services.embedded.restarts import RestartPolicy
from shared.clock import ManualClock

POLICY = RestartPolicy(limit=3, window_s=600.0, backoff_s=1.0, backoff_limit_s=8.0)


class Target:
    """A server whose starts end as they are told to: None = it runs, a fault = it does not start."""

    def __init__(self, log: Path, *starts: EmbeddedFault | None) -> None:
        self.log = log
        self.child: Any = SimpleNamespace(running=False, exit_code=1, log_began=0)
        self.starts = list(starts)

    def start(self) -> None:
        self.child = None
        outcome = self.starts.pop(0)
        if outcome is not None:
            raise outcome
        self.child = SimpleNamespace(running=True, exit_code=None, log_began=0)


def keeper(target: Target, clock: ManualClock) -> tuple[Keeper, list[str]]:
    said: list[str] = []
    return Keeper("postgres", target, POLICY, said.append, clock), said


def drive(kept: Keeper, clock: ManualClock, seconds: int) -> int:
    """Ticks, one a second; how many of them started a process."""
    started = 0
    for _ in range(seconds):
        started += kept.tick()
        clock.advance(1.0)
    return started


def test_a_start_that_fails_is_tried_again(tmp_path: Path) -> None:
    clock = ManualClock()
    target = Target(tmp_path / "log", EmbeddedFault("no room"), EmbeddedFault("no room"), None)
    kept, said = keeper(target, clock)
    assert drive(kept, clock, 20) == 1
    assert target.child.running
    assert said == [
        "postgres ended (exit code 1); restarting in 1 s",
        "postgres could not be started; restarting in 2 s",
        "postgres could not be started; restarting in 4 s",
    ]


def test_starts_that_go_on_failing_end_the_stack_with_the_reason(tmp_path: Path) -> None:
    clock = ManualClock()
    target = Target(tmp_path / "log", *(EmbeddedFault("no room") for _ in range(3)))
    kept, _ = keeper(target, clock)
    with pytest.raises(EmbeddedFault, match=r"giving up\. no room"):
        drive(kept, clock, 100)
    assert not target.starts


def test_a_stop_while_starting_is_no_failure(tmp_path: Path) -> None:
    clock = ManualClock()
    kept, _ = keeper(Target(tmp_path / "log", Cancelled("asked to stop")), clock)
    with pytest.raises(Cancelled):
        drive(kept, clock, 5)


def test_a_child_that_says_why_it_cannot_run_is_quoted_in_one_line(tmp_path: Path) -> None:
    log, clock = tmp_path / "log", ManualClock()
    target = Target(log)
    target.child = SimpleNamespace(running=False, exit_code=1, log_began=0)
    policy = RestartPolicy(limit=0, window_s=600.0, backoff_s=1.0, backoff_limit_s=8.0)
    log.write_text(
        "2026-01-01 00:00:00,1 INFO    w a.b: one\n2026-01-01 00:00:00,1 CRITICAL w a.b: the worker stops: no\nx\n"
    )
    with pytest.raises(EmbeddedFault) as caught:
        Keeper("worker", target, policy, lambda _: None, clock).tick()
    assert caught.value.message == (
        f"worker ended (exit code 1) after 0 restarts: giving up: the worker stops: no. Its log: {log}"
    )
    log.write_text("one\ntwo\n")
    with pytest.raises(EmbeddedFault, match=r"\. The end of .*:\none\ntwo$"):
        Keeper("worker", target, policy, lambda _: None, clock).tick()
