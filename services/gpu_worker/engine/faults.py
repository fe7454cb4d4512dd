"""What may go wrong on purpose. Given to an `Engine` by tests and by `prove` alone: no setting leads here.

The base class does nothing; a test overrides what it wants to happen. `OutOfMemory` is real: the runner raises it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from shared.errors import EngineFault

Phase: TypeAlias = Literal["prefill", "verify"]
StreamKey: TypeAlias = tuple[str, int]


class OutOfMemory(EngineFault):
    """A launch did not fit into memory. The states of its slots are undefined."""

    code = "out_of_memory"


class Faults:
    """Hooks, each named by the moment at which it is asked."""

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        """A launch wrote its rows, and nobody was told. Raise `OutOfMemory` (or another EngineFault) to break it."""

    def overshoot(self, stream: StreamKey) -> int:
        """Columns that the stream's rounds may take past its end."""
        return 0

    def demote(self, stream: StreamKey, rounds: int) -> bool:
        """Whether to hand the stream, `rounds` verify passes old, to plain decode before the next burst."""
        return False

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        """Whether the stream, which has `rows` rows in the cache, gives way before this step though there is room."""
        return False
