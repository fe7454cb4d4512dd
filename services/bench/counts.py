"""Counts of verify passes, which add up over streams, and the figures that they make."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Tokens are those of verify passes alone: the one that a prefill decides is left out, a stop id counts."""

    streams: int = 0
    rounds: int = 0
    tokens: int = 0
    drafted_at: tuple[int, ...] = ()  #: by position within a round
    accepted_at: tuple[int, ...] = ()
    timed_tokens: int = 0  #: of steps that only decode
    seconds: float = 0.0  #: of the processor, in those

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            streams=self.streams + other.streams,
            rounds=self.rounds + other.rounds,
            tokens=self.tokens + other.tokens,
            drafted_at=_added(self.drafted_at, other.drafted_at),
            accepted_at=_added(self.accepted_at, other.accepted_at),
            timed_tokens=self.timed_tokens + other.timed_tokens,
            seconds=self.seconds + other.seconds,
        )

    @property
    def tokens_per_verify(self) -> float:
        """1 of streams that a prefill ended."""
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def drafts_per_verify(self) -> float:
        return sum(self.drafted_at) / self.rounds if self.rounds else 0.0

    @property
    def cpu_rate(self) -> float:
        """Tokens a second of processor time; 0 where nothing was timed."""
        return self.timed_tokens / self.seconds if self.seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """For the evidence. Acceptance by position is of the rounds that drafted so far."""
        return {
            "streams": self.streams,
            "tokens": self.tokens,
            "verifies": self.rounds,
            "tokens_per_verify": round(self.tokens_per_verify, 3),
            "drafts_per_verify": round(self.drafts_per_verify, 3),
            "acceptance_by_position": [
                round(accepted / drafted, 3)
                for drafted, accepted in zip(self.drafted_at, self.accepted_at, strict=True)
            ],
            "tokens_per_cpu_second": round(self.cpu_rate, 1),
        }


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
