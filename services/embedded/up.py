"""`burstline up`: the stack in the foreground until a signal."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType
from typing import Final

from services.embedded.config import EmbeddedSettings
from services.embedded.faults import Cancelled, EmbeddedFault
from services.embedded.sizes import Sizes
from services.embedded.stack import Stack
from shared.config import CommonSettings, load

TICK_S: Final = 0.25


class Flag:
    """Set by a signal's handler, and without a lock: a handler that sets a `threading.Event` while the thread below it
    is about to wait for that event never returns."""

    def __init__(self) -> None:
        self._up = False

    def set(self) -> None:
        self._up = True

    def is_set(self) -> bool:
        return self._up


class Signals:
    """The first SIGINT or SIGTERM asks to stop, the second not to wait for drains."""

    def __init__(self) -> None:
        self.asked = Flag()
        self.again = Flag()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        (self.again if self.asked.is_set() else self.asked).set()


def main(sizes: Sizes = Sizes(), *, model: str = "pocket") -> int:
    """Run until a signal; `model` is what the greeting's example asks.

    Returns the exit status: 0 after a drain, 1 when the stack could not start or go on.
    """
    settings, common = load(EmbeddedSettings), load(CommonSettings)
    signals = Signals()
    stack = Stack(
        settings, common, report=say, stop=signals.asked.is_set, hurry=signals.again.is_set, sizes=sizes
    )
    try:
        say(f"Starting the stack on {common.data_dir}: NATS, Postgres, broker, worker with {model}, gateway")
        with stack:
            say(_greeting(stack, common, model))
            fault = _keep(stack, signals)
            say(f"burstline: {fault.message}" if fault else "draining (Ctrl-C again: at once)")
    except Cancelled:
        say("stopped while starting")
        return 1
    except EmbeddedFault as fault:
        say(f"burstline: {fault.message}")
        return 1
    say("stopped")
    return 1 if fault else 0


def _keep(stack: Stack, signals: Signals) -> EmbeddedFault | None:
    """Until a signal, or until the stack cannot go on: then why, which is told before the drains, not minutes later."""
    try:
        while not signals.asked.is_set():
            stack.tick()
            time.sleep(TICK_S)
    except Cancelled:
        return None
    except EmbeddedFault as fault:
        return fault
    return None


def say(line: str) -> None:
    """One line on standard error: standard output stays free."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - this is a command's own output


def _greeting(stack: Stack, common: CommonSettings, model: str) -> str:
    others = "".join(f"            {stack.health_url(name)}/v1\n" for name in stack.names("gateway")[1:])
    return (
        f"\nBurstline is up.\n"
        f"  URL       {stack.gateway_url}/v1\n"
        f"{others}"
        f"  key       {stack.key}\n"
        f"  logs      {common.data_dir}/logs\n"
        f"  try       curl {stack.gateway_url}/v1/chat/completions -H 'Authorization: Bearer {stack.key}' "
        "-H 'Content-Type: application/json' "
        f'-d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'\n'
        "  then      burstline trace last\n"
        "Ctrl-C stops it.\n"
    )
