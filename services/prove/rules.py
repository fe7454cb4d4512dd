"""How tokens are picked in a cell: greedy, seeded sampling, penalties, truncation, stops, log probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services.gpu_worker.engine.requests import SamplingParams
from services.prove.models import VOCAB

TOP: Final = 3
"""Alternatives beside each chosen token where log probabilities are asked for."""

STOPS: Final = frozenset(range(5, VOCAB, 53))
"""Enough ids that sampled streams end inside a burst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """`logprobs`: asked for by the cell (the reference always has them)."""

    sampling: SamplingParams
    logprobs: bool = False
    stop_ids: frozenset[int] = frozenset()


RULES: Final[Mapping[str, Rule]] = {
    "greedy": Rule(sampling=SamplingParams(seed=0, temperature=0.0)),
    "greedy, logprobs": Rule(sampling=SamplingParams(seed=0, temperature=0.0), logprobs=True),
    "greedy, penalties": Rule(
        sampling=SamplingParams(
            seed=0,
            temperature=0.0,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.4,
            logit_bias=((300, 1.5), (301, -2.0)),
        ),
        logprobs=True,
    ),
    "sampled": Rule(sampling=SamplingParams(seed=0xFEED_5EED_0000_0042, temperature=1.0), logprobs=True),
    "sampled, truncated": Rule(
        sampling=SamplingParams(seed=43, temperature=0.8, top_k=60, top_p=0.95, min_p=0.02)
    ),
    "sampled, penalties, stops": Rule(
        sampling=SamplingParams(
            seed=44, temperature=0.9, repetition_penalty=1.1, frequency_penalty=0.3, min_tokens=5
        ),
        logprobs=True,
        stop_ids=STOPS,
    ),
    "few ids": Rule(
        # Few candidates: drafts agree often, so whole runs are accepted.
        sampling=SamplingParams(
            seed=45, temperature=1.0, presence_penalty=0.8, allowed_ids=frozenset(range(400, 412))
        )
    ),
}
