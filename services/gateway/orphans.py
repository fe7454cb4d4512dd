"""When a request's workers are gone: those of its fingerprint (C1), and those of its model, who may take it over.

    heard lately ──> silent for `worker_silence_s` ──> gone for `orphan_grace_s` more ──> ended with an error
         ^──────────── a worker of the fingerprint (restarted, mostly), or an heir ───────────┘

The grace is what a worker needs to start again with the same weights; then it is delivered the request, and goes on.
A gateway that cannot hear judges nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from shared.clock import Clock
from shared.errors import Unavailable


class OrphanWatch:
    """Of one request. Looked at while nothing comes."""

    def __init__(
        self,
        fingerprint: str,
        *,
        staffed: Callable[[str], bool],
        hearing: Callable[[], Awaitable[bool]],
        clock: Clock,
        grace_s: float,
    ) -> None:
        """`staffed`: was a worker heard lately that will come to the request; `hearing`: would it have been heard."""
        self._fingerprint: Final = fingerprint
        self._staffed: Final = staffed
        self._hearing: Final = hearing
        self._clock: Final = clock
        self._grace_ns: Final = int(grace_s * 1e9)
        self._gone_since_ns: int | None = None

    async def check(self) -> None:
        """A look.

        Raises:
            Unavailable: `workers_gone`, no such worker was heard for the silence and the grace.
        """
        if self._staffed(self._fingerprint) or not await self._hearing():
            self._gone_since_ns = None
            return
        now = self._clock.monotonic_ns()
        if self._gone_since_ns is None:
            self._gone_since_ns = now
        if now - self._gone_since_ns >= self._grace_ns:
            raise Unavailable("the workers that could answer this request are gone", code="workers_gone")
