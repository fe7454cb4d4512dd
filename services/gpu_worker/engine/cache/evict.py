"""Which entries to let go first. Pure: candidates in, keys out, so that policies can be exchanged and compared.

A policy orders candidates, the least worth keeping first. `worst_first` is ours; the others are what it is measured
against in `burstline bench cache`. All scale each term to 0..1 over the candidates, so that weights are comparable, and
break ties by key, so that two workers in the same state decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An entry nobody uses, with at most one child."""

    key: bytes
    used_at: int  #: tick of the last use
    replay_tokens: int  #: rows to compute again from the nearest state below, if this state goes
    blocks: int  #: freed with it; 0 while an entry stands on its rows
    snapshots: int
    flops_per_byte: float = 0.0
    """What a hit saves beyond the nearest state below, over the bytes that going frees."""


Policy = Callable[[Sequence[Candidate], int], list[Candidate]]
"""(candidates, now) -> the same candidates, worst first. `now` is the tree's tick."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """score = recency / age + replay * replay length + flops * FLOPs a byte; each term scaled, the smallest goes first.

    `recency` alone is LRU; with `replay` it is SegLen; with `flops` instead it is Marconi, whose alpha is the quotient
    of the two weights.
    """

    recency: float
    replay: float = 0.0
    flops: float = 0.0

    def __call__(self, candidates: Sequence[Candidate], now: int) -> list[Candidate]:
        terms = (
            (self.recency, [1.0 / (1 + now - candidate.used_at) for candidate in candidates]),
            (self.replay, [float(candidate.replay_tokens) for candidate in candidates]),
            (self.flops, [candidate.flops_per_byte for candidate in candidates]),
        )
        scaled = [(weight, _scaled(values)) for weight, values in terms]
        scores = [sum(weight * values[i] for weight, values in scaled) for i in range(len(candidates))]
        order = sorted(range(len(candidates)), key=lambda i: (scores[i], candidates[i].key))
        return [candidates[i] for i in order]


worst_first: Final = Blend(recency=0.5, replay=0.5, flops=0.3)
"""Recency and replay length; FLOPs a byte come second.

The weights are the best of sixteen blends on traces of `bench cache`: 73.0 % of the prompt tokens served, 72.3 with SegLen's
own 0.85 : 0.15, 72.4 with Marconi's, 71.9 with LRU. On twelve traces and pool sizes that took no part in the choice it
is 76.5, 76.4, 76.3 and 75.9: little to choose between the three, and all above LRU.
"""

POLICIES: Final[Mapping[str, Policy]] = {
    "ours": worst_first,
    "lru": Blend(recency=1.0),
    "seglen": Blend(recency=0.85, replay=0.15),
    "marconi": Blend(recency=1.0, flops=1.0),
}


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
