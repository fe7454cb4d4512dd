"""How much should be free, for those who wait and those who run; and the first steps to it, which need nobody's word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.line import Line
from services.gpu_worker.engine.preemption import spare_blocks
from services.gpu_worker.engine.stats import Pressure
from services.gpu_worker.engine.streams import Stream

SPARE_SNAPSHOTS: Final = 2
"""Snapshots that eviction keeps free, so that the next prime can capture both its boundaries."""


class Wants:
    """`active` = the engine's running streams, seen live."""

    def __init__(self, cache: CacheManager, line: Line, active: Sequence[Stream]) -> None:
        self._cache = cache
        self._line = line
        self._active = active

    def pressure(self) -> Pressure:
        """What should be evicted so that waiting work and captures fit; falsy when nothing."""
        spare = min(SPARE_SNAPSHOTS, self._cache.snapshots.total)
        return Pressure(
            blocks=max(0, self._line.blocks_wanted + spare_blocks(self._active) - self._cache.blocks.free),
            snapshots=max(0, spare - self._cache.snapshots.free),
            ruined=self._cache.ruined,
        )

    def make_room(self) -> None:
        """What gives way moves to the host tier while that has room; only then has the broker to be asked. What no
        eviction could bring, decode-made states that nobody runs on give."""
        pressure = self.pressure()
        spared = self._line.base if self._active else None  # alone, it must not stand in its own way
        if pressure.blocks and self._cache.give_up_decoded(pressure.blocks, spared):
            pressure = self.pressure()
        if pressure:
            self._cache.make_room(pressure.blocks, pressure.snapshots)
