"""What others want to be ended, until the engine's thread looks.

Every method is one operation on a dictionary, so that any thread may ask while the engine's own takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.gpu_worker.engine.faults import StreamKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel:
    """End a choice of a request, or all of it."""

    request_id: str
    choice: int | None  #: null = every choice
    reason: str

    def covers(self, key: StreamKey) -> bool:
        """Whether it ends this stream."""
        return key[0] == self.request_id and self.choice in (None, key[1])


class Cancels:
    """Asked for and not yet taken. The engine takes all of them at least once a step."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int | None], Cancel] = {}

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, cancel: Cancel) -> None:
        """The newest reason for the same thing stands."""
        self._asked[cancel.request_id, cancel.choice] = cancel

    def take(self) -> Iterator[Cancel]:
        """Everything that was asked for by now, each once."""
        while self._asked:
            yield self._asked.popitem()[1]
