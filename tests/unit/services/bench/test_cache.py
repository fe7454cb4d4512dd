"""`bench cache` over a short trace and a tiny model: the engine serves what the replay says, and bars tell the truth."""

from __future__ import annotations

from typing import Any

import pytest

from services.bench.agents import Ask, trace
from services.bench.cache import bars, run_cache
from services.bench.replay import AttentionOnly, Hybrid, NoCache, PromptEnds, play
from services.gpu_worker.engine.cache.evict import POLICIES
from services.gpu_worker.engine.cache.prices import Prices
from services.prove.models import tiny


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return trace(tenants=1, turns=5, branches=2)


@pytest.fixture(scope="module")
def results(asks: list[Ask]) -> dict[str, Any]:
    return run_cache(tiny(), asks=asks, repeats=1)


def prices() -> Prices:
    return Prices.of(tiny().dims)


def test_fr_10_fr_11_speculation_costs_no_hit_and_changes_no_stream(results: dict[str, Any]) -> None:
    assert set(results["differences"].values()) == {0}
    assert results["host_tier"]["mismatches"] == 0


def test_fr_20_a_turn_is_its_new_tokens_and_less_than_a_grid_step(results: dict[str, Any]) -> None:
    assert 0 < results["work_beyond_new_tokens"]["max"] <= 63


def test_ours_serves_what_may_be_reused(results: dict[str, Any]) -> None:
    served = results["served"]
    assert served["ours"]["share_of_reusable"] > 0.85
    assert served["no cache"]["served"] == served["attention-only LRU"]["served"] == 0
    assert results["attention_rows_matched_but_useless"] > 0
    assert served["prompt-end checkpoints"]["served"] <= served["ours"]["served"]
    for figures in served.values():
        assert figures["computed"] + figures["served"] == results["trace"]["tokens"]


def test_every_bar_tells_its_figure(results: dict[str, Any]) -> None:
    told = {bar.name: bar for bar in bars(results)}
    work = told["work of a turn beyond its tokens after the last stable boundary"]
    assert work.holds
    assert work.value == results["work_beyond_new_tokens"]["max"]
    broken = dict(results, differences={"streams_by_speculation": 1})
    assert [bar.name for bar in bars(broken) if bar.value == 1 and not bar.holds] == [
        "streams by speculation"
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_small_pools_serve_less_and_stay_balanced(policy: str, asks: list[Ask]) -> None:
    small = Hybrid(pools=(60, 8), prices=prices(), policy=POLICIES[policy])
    roomy = Hybrid(pools=(300, 100), prices=prices())
    assert sum(play(asks, small)) < sum(play(asks, roomy))
    small.manager.check([])


def test_a_host_tier_serves_in_small_pools_what_large_ones_do(asks: list[Ask]) -> None:
    roomy = Hybrid(pools=(300, 100), prices=prices())
    tiered = Hybrid(pools=(60, 8), prices=prices(), host_bytes=prices().size(300, 100))
    assert play(asks, tiered) == play(asks, roomy)
    tiered.manager.check([])
    assert tiered.manager.tier.taken > 0


def test_other_caches_know_their_place(asks: list[Ask]) -> None:
    assert set(play(asks, NoCache())) == {0}
    attention = AttentionOnly(500)
    play(asks, attention)
    ends = PromptEnds(pools=(300, 100), prices=prices())
    play(asks, ends)
    ends.manager.check([])
    assert attention.matched > 0
