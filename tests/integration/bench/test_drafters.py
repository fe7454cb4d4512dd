"""The drafters that ship, on text that they never saw: what they bring, and that caching them loses nothing."""

from __future__ import annotations

from services.bench.drafters import (
    BLOCK,
    BLOCK_TOKENS,
    KINDS,
    MOST_LOST,
    MTP,
    MTP_TOKENS,
    run_drafters,
    shipped,
    without_cache,
)
from services.bench.held_out import held_out


def test_r_d2_shipped_drafters_bring_what_they_do_without_a_cache() -> None:
    """One tool call, all drafters; the whole table is `burstline bench spec`."""
    prompts = [prompt for prompt in held_out(1) if prompt.kind == "tools"]
    results, _ = run_drafters(shipped(KINDS), prompts, without_cache(KINDS), referenced=1, budget=32)
    figures = {name: groups["tools"] for name, groups in results.items()}
    assert figures[MTP]["tokens_per_verify"] >= MTP_TOKENS
    assert figures[BLOCK]["tokens_per_verify"] >= BLOCK_TOKENS
    for name, told in figures.items():
        if "reference" in told:
            assert abs(told["reference"]["lost"]) <= MOST_LOST, name
