"""What is asked: a handful of requests, greedy and sampled, that share prefixes; each has one stream (C1).

Token ids as prompts, so that no template is needed, and no end of sequence, so that the lengths are known.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

MODEL: Final = "chaos"
VOCAB: Final = 4096
FIRST_ID: Final = 300
"""Ids below are control tokens and bytes: not in a prompt."""
SHARED_PREFIXES: Final = (192, 320)
CASES: Final = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request. `temperature` 0 = greedy."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    def body(self, *, stream: bool) -> dict[str, Any]:
        """As /v1/completions takes it."""
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }


def cases(seed: int) -> tuple[Case, ...]:
    """The requests of a run."""
    draw = random.Random(f"cases of {seed}")
    prefixes = [_ids(draw, length) for length in SHARED_PREFIXES]
    return tuple(
        Case(
            name=f"{'sampled' if place % 2 else 'greedy'}-{place}",
            prompt=prefixes[place % len(prefixes)] + _ids(draw, draw.randint(8, 120)),
            max_tokens=draw.randint(64, 240),
            temperature=float(place % 2),
            seed=draw.randrange(1 << 32),
        )
        for place in range(CASES)
    )


def _ids(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(FIRST_ID, VOCAB) for _ in range(count))
