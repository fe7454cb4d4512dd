"""Waiting for something outside this process: bounded, and given up at once when the user asks to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from services.embedded.faults import Cancelled
from shared.clock import SYSTEM, Clock

INTERVAL_S: Final = 0.02

Stop = Callable[[], bool]


def never() -> bool:
    """A stop question that is always answered no."""
    return False


def until(
    check: Callable[[], bool],
    *,
    timeout_s: float,
    stop: Stop = never,
    clock: Clock = SYSTEM,
    interval_s: float = INTERVAL_S,
) -> bool:
    """Poll `check` until it holds (True) or `timeout_s` seconds have passed (False).

    Raises:
        Cancelled: `stop` answered yes.
    """
    deadline = clock.monotonic_ns() + int(timeout_s * 1e9)
    while not check():
        if stop():
            raise Cancelled("stopped while starting")
        if clock.monotonic_ns() >= deadline:
            return False
        time.sleep(interval_s)
    return True
