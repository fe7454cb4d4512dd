"""Work that fits into a wait: done in the event loop's next turn, or when its result is asked for, whichever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")


class Meanwhile(Generic[T]):
    """Of one piece of work, which does not wait for anything. Who never asks for the result is told of no fault."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Final = work
        self._done: list[T] = []
        self._fault: Exception | None = None
        self._turn: Final = asyncio.get_running_loop().call_soon(self._do)

    def result(self) -> T:
        """What came of it. Raises what the work raised."""
        if not self._done and self._fault is None:
            self._turn.cancel()
            self._do()
        if self._fault is not None:
            raise self._fault
        return self._done[0]

    def _do(self) -> None:
        try:
            self._done.append(self._work())
        except Exception as fault:  # noqa: BLE001 - belongs to who asks for the result
            self._fault = fault
