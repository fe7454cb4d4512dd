"""Figures of one pass, and of interleaved repeats: medians, spreads, ratios within a repeat."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass over a load. Times are of bursts only (draft, verify, accept), not of prefill."""

    streams: tuple[tuple[int, ...], ...]  #: the tokens, to be compared with those of the baseline
    decode_tokens: int  #: tokens that bursts delivered
    decode_seconds: float
    cpu_rate: float  #: tokens a second of processor time, over steps that only decode
    wall_seconds: float  #: with admission and prefill
    forwards: int  #: batched trunk forwards of decode
    rounds: int  #: verified sequences, summed over the forwards
    drafted_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Tokens a second while decoding."""
        return self.decode_tokens / self.decode_seconds

    @property
    def tokens_per_verify(self) -> float:
        """Tokens a verified sequence, accepted drafts and the target's own together."""
        return self.decode_tokens / self.rounds


def summary(passes: Sequence[Pass], baseline: Sequence[Pass]) -> dict[str, Any]:
    """Figures of a drafter's repeats; `baseline[i]` ran beside `passes[i]`."""
    first = passes[0]
    rates = [one.rate for one in passes]
    return {
        "tokens": first.decode_tokens,
        "tokens_per_verify": round(first.tokens_per_verify, 3),
        "trunk_forwards_per_token": round(first.forwards / first.decode_tokens, 4),
        "sequences_per_forward": round(first.rounds / first.forwards, 2),
        "acceptance_by_position": [
            round(accepted / drafted, 3)
            for drafted, accepted in zip(first.drafted_at, first.accepted_at, strict=True)
        ],
        "tokens_per_second": spread(rates, 1),
        "tokens_per_cpu_second": spread([one.cpu_rate for one in passes], 1),
        "speed_up_over_plain": spread(
            _ratios([one.rate for one in passes], [one.rate for one in baseline]), 3
        ),
        "cpu_speed_up_over_plain": spread(
            _ratios([one.cpu_rate for one in passes], [one.cpu_rate for one in baseline]), 3
        ),
    }


def _ratios(ours: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Repeat by repeat."""
    return [one / other for one, other in zip(ours, plain, strict=True)]


def spread(values: Sequence[float], digits: int) -> dict[str, float]:
    """Median, least and most."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile (by nearest rank) and most, to two digits."""
    ordered = sorted(values)
    return {
        name: round(ordered[math.ceil(share * len(ordered)) - 1], 2)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }


def by_position(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Sums of counters of different lengths, position by position."""
    width = max(map(len, counts), default=0)
    return tuple(sum(one[i] for one in counts if i < len(one)) for i in range(width))
