"""What shall happen to which stream, behind the engine's fault hooks."""

from __future__ import annotations

from collections.abc import Sequence

from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey


class Script(Faults):
    """Empty, it changes nothing. One belongs to an engine; cells write into it before they run."""

    def __init__(self) -> None:
        self._demotions: dict[StreamKey, int] = {}
        self._failures: dict[StreamKey, list[int]] = {}
        self._ways_given: dict[StreamKey, list[int]] = {}
        self._surplus: dict[StreamKey, int] = {}

    def demote_after(self, stream: StreamKey, rounds: int) -> None:
        """Hand the stream to plain decode before the first burst that begins with so many rounds behind it."""
        self._demotions[stream] = rounds

    def fail_launches(self, stream: StreamKey, numbers: Sequence[int]) -> None:
        """Let these launches of the stream run out of memory, counted from 1 over prefill and verify."""
        self._failures[stream] = sorted(numbers)

    def give_way_at(self, stream: StreamKey, rows: Sequence[int]) -> None:
        """Let the stream give way once for each of these numbers of rows, when it has as many or more."""
        self._ways_given[stream] = sorted(rows)

    def overshoot_by(self, stream: StreamKey, columns: int) -> None:
        """Let the stream's rounds take so many columns past its end."""
        self._surplus[stream] = columns

    def clear(self) -> None:
        """Forget what was planned."""
        self._demotions.clear()
        self._failures.clear()
        self._ways_given.clear()
        self._surplus.clear()

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        due = False
        for stream in streams:
            left = [number - 1 for number in self._failures.get(stream, ())]
            due = due or 0 in left
            if stream in self._failures:
                self._failures[stream] = [number for number in left if number > 0]
        if due:
            raise OutOfMemory(f"a {phase} was made to fail")

    def overshoot(self, stream: StreamKey) -> int:
        return self._surplus.get(stream, 0)

    def demote(self, stream: StreamKey, rounds: int) -> bool:
        return rounds >= self._demotions.get(stream, rounds + 1)

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        due = self._ways_given.get(stream)
        if not due or rows < due[0]:
            return False
        del due[0]
        return True
