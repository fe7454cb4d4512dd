"""Lanes that could not be pulled from: each rests for itself, longer each time, and no other waits for it.

A lane is left alone after a fault, and found again by a look once its rest is over. Looks go by the same server as pulls, so
while all of it is away nothing is tried, and the rests grow only for a lane that fails while the others do not.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from shared.clock import Clock
from shared.outage import Outage

FIRST_S: Final = 0.5
LONGEST_S: Final = 8.0
MOST: Final = 256
"""Lanes at fault that are known at once; past that the one that failed longest ago is taken for sound."""
_FORGOTTEN_S: Final = 60.0
"""So long after its rest a lane that nobody tried again is forgotten: its tenant went."""


@dataclass(frozen=True)
class _Setback:
    rest_s: float
    over_ns: int


class Setbacks:
    """Belongs to the event loop, and to one `Puller`. Bounded by `MOST`, whatever lanes come and go."""

    def __init__(self, outage: Outage, clock: Clock) -> None:
        """`outage` is told of the first lane at fault, and when none is any more."""
        self._outage: Final = outage
        self._clock: Final = clock
        self._lanes: Final[OrderedDict[str, _Setback]] = OrderedDict()  # the last that failed last

    def __len__(self) -> int:
        return len(self._lanes)

    def failed(self, lane: str, reason: str) -> None:
        """A pull on a lane failed: it rests, twice as long as the time before."""
        now_ns = self._clock.monotonic_ns()
        self._forget(now_ns)
        self._outage.failed(f"{reason}, {lane}")
        before = self._lanes.pop(lane, None)
        rest_s = FIRST_S if before is None else min(2 * before.rest_s, LONGEST_S)
        self._lanes[lane] = _Setback(rest_s, now_ns + int(rest_s * 1e9))
        if len(self._lanes) > MOST:
            self._lanes.popitem(last=False)

    def worked(self, lane: str) -> None:
        """A pull on a lane came through, with a request or without."""
        if self._lanes.pop(lane, None) is not None and not self._lanes:
            self._outage.worked()

    def failing(self, lane: str) -> bool:
        """Whether a lane failed when it was last tried, at rest or not."""
        return lane in self._lanes

    def resting(self, lane: str) -> bool:
        """Whether a lane is to be left alone for now."""
        setback = self._lanes.get(lane)
        return setback is not None and self._clock.monotonic_ns() < setback.over_ns

    def _forget(self, now_ns: int) -> None:
        """Lanes whose rest has been over for long; with the last of them the outage."""
        old_ns = now_ns - int(_FORGOTTEN_S * 1e9)
        old = [lane for lane, setback in self._lanes.items() if setback.over_ns < old_ns]
        for lane in old:
            del self._lanes[lane]
        if old and not self._lanes:
            self._outage.worked()
