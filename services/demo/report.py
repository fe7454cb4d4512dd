"""The figures of a turn, what they must satisfy, and how they are shown."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

from services.demo.client import Answer
from shared.protocol.chain import GRID
from shared.tracestore import StoredSpan

LEVELS: Final = 3
ALIKE: Final = 4


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answered request, as the JSON line tells it. `tool_calls` = how many calls the answer made."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_per_verify: float
    trace_id: str
    text: str
    seconds_to_first_token: float
    tool_calls: int


def turn_of(answer: Answer) -> Turn:
    """The figures of one answer."""
    return Turn(
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=answer.completion_tokens,
        tokens_per_verify=round(float(answer.details.get("tokens_per_verify") or 0.0), 2),
        trace_id=answer.trace_id,
        text=answer.text,
        seconds_to_first_token=round(answer.first_token_s, 3),
        tool_calls=len(answer.tool_calls),
    )


def reuse_faults(requests: list[Turn], header_tokens: int) -> list[str]:
    """What is wrong with the reuse of a conversation's requests, in order; [] = nothing.

    The stable part of request i (its prompt without the generation header) begins request i + 1, and its last grid
    position was captured: at most 63 tokens of it may be computed again.
    """
    faults = []
    for number, (before, now) in enumerate(itertools.pairwise(requests), start=2):
        least = before.prompt_tokens - header_tokens - (GRID - 1)
        if now.cached_tokens < least:
            faults.append(f"request {number} reused {now.cached_tokens} tokens; at least {least} could be")
    return faults


def essential(spans: list[StoredSpan]) -> list[StoredSpan]:
    """The spans that fit on a screen: three levels, and of a run of equal names the first few."""
    parents = {span.span_id: span.parent_id for span in spans}
    seen: Counter[tuple[str, str]] = Counter()
    kept = []
    for span in spans:
        seen[span.parent_id, span.name] += 1
        if _depth(span.span_id, parents) < LEVELS and seen[span.parent_id, span.name] <= ALIKE:
            kept.append(span)
    return kept


def _depth(span_id: str, parents: dict[str, str]) -> int:
    depth = 0
    while (span_id := parents[span_id]) in parents:
        depth += 1
    return depth


def figures(turn: Turn) -> str:
    """One line for a person."""
    return (
        f"prompt {turn.prompt_tokens} (cached {turn.cached_tokens}), new {turn.completion_tokens}, "
        f"{turn.tokens_per_verify:g} tokens a verify, first token {turn.seconds_to_first_token:.2f} s, "
        f"trace {turn.trace_id}"
    )


def result(
    turns: list[Turn], *, spec_equals_plain: bool, other_tenant_cached: int, spans: int, first_answer_s: float
) -> dict[str, Any]:
    """The object of the last line."""
    return {
        "turns": [asdict(turn) for turn in turns],
        "spec_equals_plain": spec_equals_plain,
        "other_tenant_cached_tokens": other_tenant_cached,
        "spans": spans,
        "seconds_to_first_answer": round(first_answer_s, 1),
    }
