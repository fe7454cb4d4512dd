"""When a crashed child starts again: a pure decision, so that its tests need no process and no clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """At most `limit` restarts within `window_s`; the delay doubles from `backoff_s` up to `backoff_limit_s`."""

    limit: int
    window_s: float
    backoff_s: float
    backoff_limit_s: float

    def decide(self, earlier_ns: tuple[int, ...], now_ns: int) -> float | None:
        """Seconds to wait before the next restart, or None to give up.

        `earlier_ns`: monotonic times of this child's restarts, ascending.
        """
        recent = self.recent(earlier_ns, now_ns)
        if len(recent) >= self.limit:
            return None
        return min(self.backoff_s * 2.0 ** len(recent), self.backoff_limit_s)

    def recent(self, earlier_ns: tuple[int, ...], now_ns: int) -> tuple[int, ...]:
        """The restarts that still count."""
        return tuple(at for at in earlier_ns if now_ns - at < self.window_s * 1e9)
