"""What a trace's prompts have in common, which is what a perfect cache could serve.

*Reusable* tokens of a prompt are its longest common prefix with any earlier prompt of its tenant, not rounded to anything,
and at most all but one, since the last row has to be computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.bench.agents import Ask


def reusable(asks: Sequence[Ask]) -> list[int]:
    """Of each prompt: its longest common prefix with an earlier one of its tenant, at most all but one."""
    return [
        min(max(shared, default=0), len(ask.tokens) - 1)
        for ask, shared in zip(asks, _shared(asks), strict=True)
    ]


def stable_floor(asks: Sequence[Ask]) -> list[int]:
    """Of each prompt: the deepest stable boundary of an earlier one that lies in what both share; 0 without one."""
    earlier: dict[int, list[Ask]] = {}
    floors = []
    for ask, shared in zip(asks, _shared(asks), strict=True):
        known = earlier.setdefault(ask.tenant, [])
        floors.append(max((k.stable for k, n in zip(known, shared, strict=True) if k.stable <= n), default=0))
        known.append(ask)
    return floors


def _shared(asks: Sequence[Ask]) -> list[list[int]]:
    """Common prefixes of each prompt with all earlier ones of its tenant."""
    earlier: dict[int, list[tuple[int, ...]]] = {}
    result = []
    for ask in asks:
        known = earlier.setdefault(ask.tenant, [])
        result.append([common_prefix(ask.tokens, other) for other in known])
        known.append(ask.tokens)
    return result


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two prompts share from their start."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.array(one[:length]) != np.array(other[:length]))
    return int(differ[0]) if len(differ) else length
