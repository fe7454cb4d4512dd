"""The engine on latent attention and on qwen3_next, with their MTP heads: hits, spills, preemption change no bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Parked
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.latent_config import GLM_DSA
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random_latent import latent_hf_config, write_random_latent
from services.gpu_worker.engine.models.random_next import EXPERTS, next_hf_config, write_random_next
from services.gpu_worker.engine.requests import GenerateRequest
from tests.engine_kit import WARM, Driver, Outcome, baseline, build, prompt, request, run_one

PLENTY = 10**9
ALWAYS = EngineLimits(draft_cost=0.0, ngram_cost=0.0, floor=0.0)
TIGHT = EngineLimits(decode_reserve=1, burst_rounds=4, draft_cost=0.0, ngram_cost=0.0, floor=0.0)
LONG = prompt(230, seed=4)

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "latent": lambda at: write_random_latent(at, latent_hf_config(GLM_DSA), seed=7),
    "next": lambda at: write_random_next(at, next_hf_config(**EXPERTS), seed=7),
}


@cache
def model(name: str) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        return load_model(FOLDERS[name](Path(folder) / "model"))


def engine(name: str, **sizes: Any) -> Engine:
    return build(model=model(name), **{"limits": ALWAYS} | sizes)


def turn(name: str, tokens: tuple[int, ...] = LONG, **fields: Any) -> GenerateRequest:
    """Sampled, so that one wrong row anywhere changes what is said."""
    return request(tokens, name, **{"max_tokens": 16, "sampling": WARM, "top_logprobs": 3} | fields)


def said(outcome: Outcome) -> tuple[object, ...]:
    return outcome.tokens, outcome.logprobs


@cache
def cold(name: str, tokens: tuple[int, ...] = LONG, max_tokens: int = 16) -> tuple[object, ...]:
    plain = {"use_cache": False, "drafter": "none", "speculation_k": 0}
    return said(run_one(engine(name), turn("cold", tokens, max_tokens=max_tokens, **plain)))


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize(("drafter", "chunk"), [("mtp", 64), ("none", 192)])
def test_c1_hits_chunks_and_drafters_change_no_bit(name: str, drafter: str, chunk: int) -> None:
    one = engine(name, prefill_chunk=chunk)
    fields: dict[str, Any] = {"drafter": drafter, "speculation_k": 0 if drafter == "none" else 4}
    assert said(run_one(one, turn("first", capture_at=64, **fields))) == cold(name)
    again = run_one(one, turn("again", **fields))
    assert (said(again), again.cached_tokens) == (cold(name), 192)
    other = LONG[:100] + prompt(80, seed=5)
    branch = run_one(one, turn("branch", other, **fields))
    assert (said(branch), branch.cached_tokens) == (cold(name, other), 64)
    baseline(one)


@pytest.mark.parametrize("name", FOLDERS)
def test_r_s1_the_heads_drafts_are_verified_and_some_are_right(name: str) -> None:
    outcome = run_one(engine(name), turn("one", drafter="mtp", speculation_k=3, max_tokens=60))
    assert said(outcome) == cold(name, LONG, 60)
    telemetry = outcome.end.telemetry
    assert telemetry.drafted > 30
    assert 0 < telemetry.accepted < telemetry.drafted


@pytest.mark.parametrize("name", FOLDERS)
def test_fr_7_spilled_rows_come_back_as_the_same_bits(name: str) -> None:
    one = engine(name, host_tier_bytes=PLENTY)
    run_one(one, turn("first"))
    assert one.spill([entry.key for entry in one._cache.tree.entries()])
    warm = run_one(one, turn("again"))
    assert (said(warm), warm.cached_tokens) == (cold(name), 192)
    assert one.stats().mismatches == 0
    baseline(one)


@pytest.mark.parametrize("name", FOLDERS)
def test_fr_18_streams_that_give_way_come_back_and_say_the_same(name: str) -> None:
    items = [prompt(100 + 20 * number, seed=20 + number) for number in range(2)]
    one = engine(name, limits=TIGHT, num_blocks=5, max_context=320)
    driver = Driver(one)
    outcomes = driver.run(
        turn(f"r{number}", tokens, speculation_k=3, drafter="mtp", max_tokens=60)
        for number, tokens in enumerate(items)
    )
    for number, tokens in enumerate(items):
        assert said(outcomes[f"r{number}", 0]) == cold(name, tokens, 60)
    assert any(isinstance(event, Parked) and event.preempted for event in driver.events)
    baseline(one)


@pytest.mark.parametrize("name", FOLDERS)
def test_decode_made_rows_are_gone_on_from(name: str) -> None:
    one = engine(name)
    first = run_one(one, turn("one", reuse="decode", drafter="mtp", speculation_k=3))
    tokens = (*LONG, *first.tokens, *prompt(70, seed=12))
    second = run_one(one, turn("two", tokens, reuse="decode", drafter="mtp", speculation_k=3))
    assert second.cached_tokens == len(LONG) + len(first.tokens)
    plain = engine(name)
    run_one(plain, turn("one", reuse="decode", drafter="none", speculation_k=0))
    expected = run_one(plain, turn("two", tokens, reuse="decode", drafter="none", speculation_k=0))
    assert said(second) == said(expected)
    baseline(one)


def test_an_entry_of_latents_is_charged_for_one_row_a_layer() -> None:
    """5 planes, the head's among them, of 32 + 8 elements and an index key of 16; no state but the hidden of the row before."""
    one = engine("latent")
    (low, high) = run_one(one, turn("first", capture_at=64)).captured
    assert low.kv_bytes == 5 * (40 + 16) * 64 * 4
    assert high.kv_bytes == 2 * low.kv_bytes
    assert low.state_bytes == one.state_bytes == one.dims.hidden * 4
    assert Prices.of(one.dims).block_bytes == one.kv.block_bytes
    assert Prices.of(one.dims).state_bytes == one.state_bytes


def test_prices_count_the_products_that_are_run() -> None:
    """Of 4 layers of latent attention, one plain and three with 3 of 8 experts; hidden 64, 4 heads."""
    prices = Prices.of(engine("latent").dims)
    down, queries, absorbed, out = 64 * (40 + 32 + 8), 40 * 4 * 32, 4 * 32 * (24 + 16), 4 * 16 * 64
    index = 64 * (16 + 16) + 40 * 16 * 16
    attention = 2 * (down + queries + absorbed + out + index)
    feed_forward = 6 * 64 * (128 + 3 * (24 + 3 * 24))
    assert prices.token_flops == 4 * attention + feed_forward
    assert prices.pair_flops == 4 * (4 * (2 * 32 + 8) + 16 * 16)
