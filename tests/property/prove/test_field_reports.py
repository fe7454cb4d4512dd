"""Reports of other engines, tried on this one with the proof's own driver and its comparison by bits."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache

import pytest
import torch

from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.prove.driver import Driver, Record, WatchedEngine, same_bits
from services.prove.models import tiny
from services.prove.prompts import prompt
from services.prove.script import Script
from shared.protocol.chain import chain

GREEDY = SamplingParams(seed=1, temperature=0.0)


def driver(*, batch: int = 16, blocks: int = 384, faults: Script | None = None) -> Driver:
    config = EngineConfig(
        num_blocks=blocks,
        num_slots=batch,
        num_snapshots=64,
        max_batch=batch,
        prefill_chunk=128,
        max_context=min(1152, 64 * blocks),
    )
    return Driver(WatchedEngine(config, tiny(), limits=EngineLimits(draft_cost=0.0), faults=faults))


def item(tokens: tuple[int, ...], name: str, **fields: object) -> GenerateRequest:
    root = hashlib.sha256(b"reports").digest()
    plain = GenerateRequest(
        request_id=name,
        root=root,
        tokens=tokens,
        chain=chain(root, tokens),
        sampling=GREEDY,
        max_tokens=24,
        top_logprobs=5,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


@cache
def alone(request: GenerateRequest) -> Record:
    """The request alone and cold, plain, in an engine of its own."""
    run = driver(batch=1)
    run.run([replace(request, use_cache=False, speculation_k=0)])
    return run.records[request.key]


def assert_same(got: Record, expected: Record) -> None:
    assert got.tokens == expected.tokens
    assert got.logprobs == expected.logprobs
    assert got.cache is not None
    assert expected.cache is not None
    assert same_bits(got.cache.rows, expected.cache.rows)
    assert same_bits(got.cache.state, expected.cache.state)
    assert same_bits(got.cache.window, expected.cache.window)


@pytest.mark.parametrize("together", [1, 16])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("use_cache", [False, True])
def test_fr_1_speculation_and_cache_together_change_nothing(together: int, k: int, use_cache: bool) -> None:
    """A, then B which goes on from A, then A again; with tools in the prompt; alone and sixteen at once."""
    first = prompt("tool call")
    longer = first + prompt("unicode")[:90]
    run = driver()
    for turn, tokens in enumerate((first, longer, first)):
        names = [f"{turn}-{number}" for number in range(together)]
        wanted = [item(tokens, name, speculation_k=k, use_cache=use_cache) for name in names]
        run.run(wanted)
        for request in wanted:
            assert_same(run.records[request.key], alone(item(tokens, "alone")))
    if use_cache and together == 1:
        assert run.records["2-0", 0].cached_tokens > 0


def test_fr_2_staggered_ends_leave_every_state_its_own() -> None:
    """Rows close up every few steps as streams end; the states are those of each request alone, accepted counts included."""
    wanted = [
        item(
            prompt("unicode")[: 80 + 7 * number],
            f"{number}",
            max_tokens=5 * (number + 1),
            speculation_k=1 + number % 5,
            sampling=SamplingParams(seed=number, temperature=1.0),
        )
        for number in range(10)
    ]
    run = driver()
    run.run(wanted)
    assert run.engine.stats().accepted > 0
    for request in wanted:
        assert_same(run.records[request.key], alone(request))


@pytest.mark.parametrize("k", [1, 4, 7])
def test_fr_5_no_drafter_changes_a_long_greedy_stream_or_its_logprobs(k: int) -> None:
    request = item(prompt("repeated text"), "r", max_tokens=64, speculation_k=k)
    run = driver()
    run.run([request])
    assert_same(run.records[request.key], alone(request))


@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_fr_18_rows_of_a_launch_that_was_lost_reach_nobody(k: int) -> None:
    """Twelve requests in a pool for five; verifies write their rows and are lost before anybody is told."""
    script = Script()
    run = driver(batch=8, blocks=25, faults=script)
    wanted = [
        item(
            prompt("unicode")[: 200 + number],
            f"{number}",
            speculation_k=k,
            sampling=SamplingParams(seed=number, temperature=1.0),
        )
        for number in range(12)
    ]
    for number, request in enumerate(wanted):
        if number % 2:
            script.fail_launches(request.key, [3 + number % 4, 9 + number])
    run.run(wanted)
    assert run.happened["Parked"] >= 6
    for request in wanted:
        assert_same(run.records[request.key], alone(request))
    run.clear()


@pytest.mark.parametrize("k", [0, 5])
def test_fr_36_a_seed_is_a_stream_alone_and_in_company(k: int) -> None:
    """Seed 42 five times and seed 43 five times, all at once: equal within a seed, not between seeds."""
    seeds = {42: SamplingParams(seed=42, temperature=1.0), 43: SamplingParams(seed=43, temperature=1.0)}
    wanted = [
        item(prompt("unicode"), f"{seed}-{number}", sampling=sampling, speculation_k=k)
        for number in range(5)
        for seed, sampling in seeds.items()
    ]
    run = driver()
    run.run(wanted)
    streams = {seed: {tuple(run.records[f"{seed}-{n}", 0].tokens) for n in range(5)} for seed in seeds}
    for seed, sampling in seeds.items():
        assert streams[seed] == {tuple(alone(item(prompt("unicode"), "alone", sampling=sampling)).tokens)}
    assert streams[42] != streams[43]


def test_the_comparison_sees_one_bit() -> None:
    one = torch.randn(4, 4)
    other = one.clone()
    assert same_bits(one, other)
    other.view(torch.int32)[3, 3] ^= 1
    assert not same_bits(one, other)
