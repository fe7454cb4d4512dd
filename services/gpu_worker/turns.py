"""Whose turn it is: which request subject a worker looks at next. Decides, and does nothing else.

    own       req.<fingerprint>.to.<this worker>.<lane>
    high, normal, low   req.<fingerprint>.<priority>.<lane>
    spill     req.<fingerprint>.to.<another worker>.<lane>: what its owner leaves
    orphans   req.<another fingerprint>.…: what has no worker left

The queues come by smooth weighted turns, so none starves; the lanes of a queue come one request each, so a tenant with a
thousand requests is one of those who take turns, and a newcomer waits for one request of each of the others at most.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from shared.protocol import subjects

WEIGHTS: Final = {"own": 8, "spill": 8, "high": 8, "normal": 4, "low": 1, "orphans": 4}
"""Turns of each queue, of those that have something, in the order of their rank."""
MOST_A_LOOK: Final = 32
"""Subjects that one look adds: most of what it sees is being worked on, and a pull for nothing costs the server."""


class Turns:
    """Subjects that may have a message for this worker. Bounded by the subjects that the stream has messages of."""

    def __init__(self, own: str) -> None:
        """`own` is what the subjects of the worker's own queue begin with."""
        self._own: Final = own
        self._ours: Final = own.partition(".to.")[0] + "."
        self._queues: Final[dict[str, deque[str]]] = {name: deque() for name in WEIGHTS}
        self._expected: Final[dict[str, int]] = {}  # requests that a subject may have for us, at most
        self._credit: Final = dict.fromkeys(WEIGHTS, 0)
        self._strangers: set[str] = set()
        self._looks = zlib.crc32(own.encode())  # so that workers do not all begin at the same subject

    def queue(self, subject: str) -> str:
        """The name of a subject's queue."""
        if subject.startswith(self._own):
            return "own"
        if not subject.startswith(self._ours):
            return "orphans"
        kind = subjects.queue_of(subject)
        return "spill" if kind == "to" else kind

    def heard(self, subject: str) -> None:
        """Something came. What came for another worker is left to that one at first."""
        if self.queue(subject) in ("own", *subjects.PRIORITIES):
            self._expect(subject, self._expected.get(subject, 0) + 1)

    def looked(self, counts: Mapping[str, int]) -> None:
        """The subjects that have messages, which may all be in work. What is another worker's counts at the second look."""
        spill = {subject for subject in counts if self.queue(subject) == "spill"}
        due = [subject for subject in counts if subject not in spill or subject in self._strangers]
        self._strangers = spill
        for subject in [known for known in due if known in self._expected]:
            self._expect(subject, max(counts[subject], self._expected[subject]))
        due = sorted(subject for subject in due if subject not in self._expected)
        start = self._looks % len(due) if due else 0
        self._looks += MOST_A_LOOK
        for subject in (due[start:] + due[:start])[:MOST_A_LOOK]:
            self._expect(subject, counts[subject])

    def next(self) -> str | None:
        """The subject whose turn it is, or None: nothing is known to wait."""
        having = [name for name, lanes in self._queues.items() if lanes]
        if not having:
            return None
        for name in self._credit:
            self._credit[name] = self._credit[name] + WEIGHTS[name] if name in having else 0
        chosen = max(having, key=lambda name: self._credit[name])
        self._credit[chosen] -= sum(WEIGHTS[name] for name in having)
        return self._queues[chosen][0]

    def newcomers(self, welcome: Callable[[str], bool]) -> list[str]:
        """Who is welcome though it is nobody's turn, by rank: of the own and the shared subjects alone."""
        lanes = [lane for name in ("own", *subjects.PRIORITIES) for lane in self._queues[name]]
        return [lane for lane in lanes if welcome(lane)][:MOST_A_LOOK]

    def took(self, subject: str) -> None:
        """It gave a request. If there may be more, they come after the others'."""
        lanes = self._queues[self.queue(subject)]
        lanes.remove(subject)
        self._expected[subject] -= 1
        if self._expected[subject]:
            lanes.append(subject)
        else:
            del self._expected[subject]

    def empty(self, subject: str) -> None:
        """It had none for us."""
        del self._expected[subject]
        self._queues[self.queue(subject)].remove(subject)

    def _expect(self, subject: str, count: int) -> None:
        if self.queue(subject) not in self._queues:
            return  # of a later release
        if subject not in self._expected:
            self._queues[self.queue(subject)].append(subject)
        self._expected[subject] = count
