"""Whether this broker could have heard a worker: only silence that it would have noticed counts against one.

tick, tick, tick       heartbeats were heard and noted in between: silence counts from the first tick on
tick ... (gap) ... tick    the process or the machine stood still, NATS or Postgres was away: from the last tick on
"""

from __future__ import annotations

from datetime import datetime, timedelta

from services.cache_broker.config import BrokerSettings
from shared.clock import Clock


class Hearing:
    """Belongs to the event loop: the sweeper ticks, whoever judges a worker asks."""

    def __init__(self, settings: BrokerSettings, clock: Clock) -> None:
        self._clock = clock
        self._longest_gap = timedelta(seconds=2 * settings.sweep_interval_s)
        self._since = clock.now()
        self._last_tick = self._since

    def tick(self, *, heard: bool) -> None:
        """A look at it, every `sweep_interval_s`. `heard` = heartbeats could come in and be noted since the last."""
        now = self._clock.now()
        if not heard or now - self._last_tick > self._longest_gap:
            self._since = now
        self._last_tick = now

    def silent_since(self, silence: timedelta) -> datetime | None:
        """Who was last seen before this moment has been silent for `silence`. None = nobody can be judged now."""
        now = self._clock.now()
        if now - self._since < silence or now - self._last_tick > self._longest_gap:
            return None
        return now - silence
