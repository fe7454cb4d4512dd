"""Which entries to let go first. Pure: candidates in, keys out, so that policies can be exchanged and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

RECENCY_WEIGHT: Final = 0.85
"""The rest is the length to replay; the blend that SegLen's authors use as their example."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An entry nobody uses, with at most one child."""

    key: bytes
    used_at: int  #: tick of the last use
    replay_tokens: int  #: rows to compute again from the nearest state below, if this state goes
    blocks: int  #: freed with it; 0 while an entry stands on its rows
    snapshots: int


def worst_first(candidates: Sequence[Candidate], now: int) -> list[Candidate]:
    """Order by score = 0.85 recency + 0.15 replay length, each scaled to 0..1 over the candidates; ties by key."""
    recency = _scaled([1.0 / (1 + now - candidate.used_at) for candidate in candidates])
    replay = _scaled([float(candidate.replay_tokens) for candidate in candidates])
    scores = [
        RECENCY_WEIGHT * recent + (1.0 - RECENCY_WEIGHT) * length
        for recent, length in zip(recency, replay, strict=True)
    ]
    order = sorted(range(len(candidates)), key=lambda i: (scores[i], candidates[i].key))
    return [candidates[i] for i in order]


Policy = Callable[[Sequence[Candidate], int], list[Candidate]]


def choose(
    candidates: Sequence[Candidate], *, blocks: int, snapshots: int, now: int, policy: Policy = worst_first
) -> list[bytes]:
    """Keys whose going frees what is wanted, as far as the candidates reach; those that free nothing wanted are left."""
    keys = []
    for candidate in policy(candidates, now):
        if blocks <= 0 and snapshots <= 0:
            break
        if not ((blocks > 0 and candidate.blocks) or (snapshots > 0 and candidate.snapshots)):
            continue
        keys.append(candidate.key)
        blocks -= candidate.blocks
        snapshots -= candidate.snapshots
    return keys


def _scaled(values: list[float]) -> list[float]:
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]
