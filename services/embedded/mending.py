"""Has a NATS server started again whose disk was full, once there is room: by itself it would never store again.

Everything that it acknowledged is on the disk and is there afterwards; what was refused meanwhile was told as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from shared.clock import SYSTEM, Clock

LOOK_S: Final = 5.0


class Store(Protocol):
    """A server with a disk."""

    def store_fault(self) -> str | None: ...

    def has_room(self) -> bool: ...

    def end(self) -> None: ...


class Mender:
    """`tick` is called a few times a second, and looks every `LOOK_S`. Belongs to the supervisor's thread."""

    def __init__(self, store: Store, report: Callable[[str], None], clock: Clock = SYSTEM) -> None:
        self._store = store
        self._report = report
        self._clock = clock
        self._due_ns = 0
        self._told = False

    def tick(self) -> None:
        """End the server if it stores nothing and could again; its keeper starts it. Tells a fault once."""
        now = self._clock.monotonic_ns()
        if now < self._due_ns:
            return
        self._due_ns = now + int(LOOK_S * 1e9)
        fault = self._store.store_fault()
        if fault is None:
            self._told = False
            return
        if not self._told:
            self._told = True
            self._report(f"NATS stores nothing any more, and is restarted once its disk has room: {fault}")
        if self._store.has_room():
            self._store.end()
