"""How many requests a worker has claimed at once, and for whom it takes one more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from shared.protocol.subjects import lane_of


class Room:
    """`limit` places, and seats for guests: the first request of a tenant that has nothing here.

    A full worker would let such a newcomer wait until a request ends. Taken in, it waits for a burst: the engine lets a
    stream of whoever has most give way to it (`services.gpu_worker.engine.seats`).
    """

    def __init__(self, limit: int, *, guests: int = 0) -> None:
        self._limit = limit
        self._most = limit + guests
        self._here: Counter[str] = Counter()
        self.on_free: Callable[[], None] = lambda: None

    @property
    def taken(self) -> int:
        return self._here.total()

    @property
    def free(self) -> int:
        """Places for anybody."""
        return max(0, self._limit - self.taken)

    def welcomes(self, subject: str) -> bool:
        """Whether a request of this subject may come in now."""
        return self.taken < (self._limit if lane_of(subject) in self._here else self._most)

    def take(self, subject: str) -> bool:
        """A place or a guest's seat, if there is one."""
        if not self.welcomes(subject):
            return False
        self._here[lane_of(subject)] += 1
        return True

    def give_back(self, subject: str) -> None:
        lane = lane_of(subject)
        self._here[lane] -= 1
        if not self._here[lane]:
            del self._here[lane]
        self.on_free()
