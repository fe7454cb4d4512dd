"""The engine on a model with sliding layers: hits, spills and preemptions far beyond a window change no bit."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Burst, Parked
from services.gpu_worker.engine.faults import Faults, StreamKey
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.loader import load_model
from services.gpu_worker.engine.models.random_dense import WINDOW, dense_hf_config, write_random_dense
from services.gpu_worker.engine.requests import GenerateRequest
from tests.engine_kit import WARM, Driver, Outcome, baseline, build, prompt, request, run_one, window_model

PLENTY = 10**9
ALWAYS = EngineLimits(ngram_cost=0.0, floor=0.0)
TIGHT = EngineLimits(decode_reserve=1, burst_rounds=4, ngram_cost=0.0, floor=0.0)
LONG = prompt(450, seed=4)
"""Four windows and a half, so that the first rows of a ring were overwritten several times."""


def engine(**sizes: Any) -> Engine:
    return build(model=window_model(), **sizes)


def turn(name: str, tokens: tuple[int, ...] = LONG, **fields: Any) -> GenerateRequest:
    """Sampled, so that one wrong row anywhere changes what is said."""
    fields = {"max_tokens": 24, "sampling": WARM, "top_logprobs": 3} | fields
    return request(tokens, name, **fields)


def said(outcome: Outcome) -> tuple[object, ...]:
    return outcome.tokens, outcome.logprobs


@cache
def cold(tokens: tuple[int, ...] = LONG, max_tokens: int = 24) -> tuple[object, ...]:
    return said(run_one(engine(), turn("cold", tokens, max_tokens=max_tokens, use_cache=False)))


@pytest.mark.parametrize("chunk", [64, 192, 512])
def test_r_q2_a_chunks_size_changes_no_bit(chunk: int) -> None:
    assert said(run_one(engine(prefill_chunk=chunk), turn("again", use_cache=False))) == cold()


@pytest.mark.parametrize("cached", [448, 0], ids=["hit", "cold"])
@pytest.mark.parametrize("k", [3, 7])
def test_c1_n_gram_drafts_change_no_bit(k: int, cached: int) -> None:
    """What was said before is proposed again: all of it is accepted, some rows a launch, in rings that wrapped."""
    one = engine(limits=ALWAYS)
    first = run_one(one, turn("first", drafter="ngram", speculation_k=k))
    assert said(first) == cold()
    if not cached:
        one.evict([captured.key for captured in first.captured])
    again = run_one(one, turn("again", drafter="ngram", speculation_k=k))
    assert (said(again), again.cached_tokens) == (cold(), cached)
    assert again.end.telemetry.accepted > 10
    baseline(one)


def test_a_hit_is_restored_from_the_tail_that_was_copied() -> None:
    """The first stream goes on, its ring overwrites every row that the boundary needs; the entry has the copy."""
    warm = engine()
    first = run_one(warm, turn("first", capture_at=192))
    assert said(first) == cold()
    assert [captured.position for captured in first.captured] == [192, 448]
    for name, cached in (("again", 448), ("and again", 448)):
        outcome = run_one(warm, turn(name))
        assert (said(outcome), outcome.cached_tokens) == (cold(), cached)
    other = LONG[:200] + prompt(150, seed=5)
    outcome = run_one(warm, turn("branch", other))
    assert (said(outcome), outcome.cached_tokens) == (cold(other), 192)
    baseline(warm)


def test_c1_a_warm_ring_holds_the_bits_of_a_cold_one() -> None:
    tokens, seen = LONG + prompt(40, seed=6), []
    warm = engine()
    run_one(warm, turn("first"))
    for one in (warm, engine()):
        driver = Driver(one)
        driver.submit(turn("second", tokens))
        while not any(isinstance(event, Burst) for event in driver.step()):
            pass
        sequence = one._active[0].session.sequence
        rows = one.kv.read_rows(sequence.block_table, 0, sequence.seq_len)
        seen.append((rows, one.ring.tail(sequence.ssm_slot_idx(), sequence.seq_len), sequence.seq_len))
    assert warm._active[0].session.sequence.cached_prefix_tokens == 448
    assert seen[0][2] == seen[1][2]
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])


def test_fr_7_a_spilled_tail_comes_back_as_the_same_bits() -> None:
    one = engine(host_tier_bytes=PLENTY)
    run_one(one, turn("first", capture_at=64))
    assert one.spill([entry.key for entry in one._cache.tree.entries()])
    one.check()
    warm = run_one(one, turn("again"))
    assert (said(warm), warm.cached_tokens) == (cold(), 448)
    assert one.stats().mismatches == 0
    baseline(one)


def test_fr_8_a_wrong_byte_in_a_tail_is_a_miss() -> None:
    """A hit is the minimum over all layer groups: without its tail an entry is none."""
    one = engine(host_tier_bytes=PLENTY)
    run_one(one, turn("first"))
    (entry,) = one._cache.tree.entries()
    assert one.spill([entry.key])
    assert entry.host is not None
    assert entry.host.values.numel() == one.ring.tail_size + one.dims.hidden
    entry.host.values[7] += 1.0
    missed = run_one(one, turn("missed"))
    assert (said(missed), missed.cached_tokens) == (cold(), 0)
    assert one.stats().mismatches == 1
    one.check()


def test_an_entry_is_charged_for_its_tail_and_not_for_its_length() -> None:
    """state = 2 x layers x (W - 1) rows x kv heads x head width x 4 bytes, and one hidden; rows = the full layer alone."""
    one = engine()
    (low, high) = run_one(one, turn("first", capture_at=128)).captured
    dims = one.dims
    tail = 2 * 3 * (WINDOW - 1) * dims.kv_heads * dims.head_dim * 4
    assert low.state_bytes == high.state_bytes == one.state_bytes == tail + dims.hidden * 4
    assert low.kv_bytes == 2 * 2 * dims.kv_heads * dims.head_dim * 64 * 4
    assert high.kv_bytes == low.kv_bytes // 2 * 5


def test_memory_of_a_sequence_in_the_sliding_layers_does_not_grow() -> None:
    one = engine(prefill_chunk=128)
    before = one.ring.ring_bytes
    assert one.ring.k.shape[1] == 8 * one.ring.blocks_each == 8 * 4
    run_one(one, turn("long", prompt(900, seed=3)))
    assert one.ring.ring_bytes == before == 2 * 3 * 4 * 64 * one.dims.kv_heads * one.dims.head_dim * 4


@pytest.mark.parametrize("k", [0, 3])
def test_fr_18_streams_that_give_way_come_back_and_say_the_same(k: int) -> None:
    """Too few blocks for three: the youngest is set aside in mid decode, and another stream gets its ring."""
    items = [prompt(200 + 30 * number, seed=20 + number) for number in range(3)]
    one = engine(limits=TIGHT, num_blocks=14)
    driver = Driver(one)
    outcomes = driver.run(
        turn(f"r{number}", tokens, speculation_k=k, drafter="ngram", max_tokens=100)
        for number, tokens in enumerate(items)
    )
    for number, tokens in enumerate(items):
        assert said(outcomes[f"r{number}", 0]) == cold(tokens, 100)
    assert any(isinstance(event, Parked) and event.preempted for event in driver.events)
    baseline(one)


def test_r_s14_a_checkpoint_is_resident_while_its_tail_is() -> None:
    one = engine()
    driver = Driver(one)
    driver.submit(turn("first"))
    while not driver.engine._active or driver.engine._active[0].session.rewind_pos is None:
        driver.step()
    session = one._active[0].session
    driver.run()
    slot_was_reused = run_one(one, turn("other", prompt(300, seed=8)))
    assert slot_was_reused.cached_tokens == 0
    assert session.rewind_pos == 448
    assert session.rewind_is_resident(one._cache)
    assert session.rewind_to_checkpoint([*LONG[:448], 5, 6], one._cache) is None
    key = session.rewind_key
    assert key is not None
    one.evict([key])
    assert not session.rewind_is_resident(one._cache)


def test_two_models_of_other_windows_have_other_fingerprints() -> None:
    seen = set()
    for window in (WINDOW, WINDOW + 1):
        with tempfile.TemporaryDirectory() as folder:
            config = dense_hf_config("gemma3_text", sliding_window=window)
            model = load_model(write_random_dense(Path(folder), config, seed=7))
            seen.add(build(model=model).fingerprint)
    assert len(seen) == 2


def test_r_q6_a_whole_prompt_is_restored_with_its_tail() -> None:
    tokens, one = LONG[:448], engine()
    for name, cached in (("first", 0), ("again", 448)):
        outcome = run_one(one, turn(name, tokens))
        assert (said(outcome), outcome.cached_tokens) == (cold(tokens), cached)
    baseline(one)


class _GivesWay(Faults):
    """The stream gives way after every round, once it has decoded."""

    def __init__(self, rows: int) -> None:
        self.rows, self.given = rows, 0

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        going = rows > self.rows
        self.rows, self.given = max(self.rows, rows), self.given + going
        return going


@pytest.mark.parametrize("k", [0, 3])
def test_r_q17_a_tail_is_taken_wherever_a_round_ends(k: int) -> None:
    """Decode checkpoints lie off the grid: each is a copy of the last window at that row, and comes back as it was."""
    faults = _GivesWay(len(LONG))
    one = build(
        model=window_model(), faults=faults, limits=replace(ALWAYS, burst_rounds=1, decode_ckpt_blocks=1)
    )
    outcome = run_one(one, turn("one", speculation_k=k, drafter="ngram", max_tokens=90))
    assert said(outcome) == cold(LONG, 90)
    assert faults.given > 30
    assert one.stats().prefill_tokens < 2 * len(LONG), "it came back without its prompt"
    baseline(one)


@pytest.mark.parametrize("k", [0, 5])
def test_c1_decode_made_rows_go_on_from_their_tail(k: int) -> None:
    """`reuse = "decode"`: the next turn finds the window at the last row of the one before, whatever the drafter."""
    streams = []
    for drafted in (0, k):
        one = engine(limits=ALWAYS)
        fields: dict[str, Any] = {"reuse": "decode", "speculation_k": drafted, "drafter": "ngram"}
        first = run_one(one, turn("one", **fields))
        assert said(first) == cold()
        tokens = (*LONG, *first.tokens, *prompt(150, seed=12))
        second = run_one(one, turn("two", tokens, **fields))
        assert second.cached_tokens == len(LONG) + len(first.tokens)
        assert second.end.reuse == "decode"
        streams.append(said(second))
        baseline(one)
    assert streams[0] == streams[1]


def test_prices_count_the_tail() -> None:
    one = engine()
    assert Prices.of(one.dims).state_bytes == one.state_bytes
    assert Prices.of(one.dims).block_bytes == one.kv.block_bytes


def test_a_window_that_no_sequence_fills_costs_no_more_than_the_context() -> None:
    """And is full attention: the bits are those of the same weights under any wider window."""
    streams = []
    for window in (512, 4000):
        with tempfile.TemporaryDirectory() as folder:
            config = dense_hf_config("gemma3_text", sliding_window=window)
            model = load_model(write_random_dense(Path(folder), config, seed=7))
        one = build(model=model, max_context=512)
        assert one.ring.blocks_each == (512 + 128) // 64
        assert Prices.of(one.dims).state_bytes == one.state_bytes
        for cached in (0, 448):
            outcome = run_one(one, turn(f"r{cached}"))
            assert outcome.cached_tokens == cached
            streams.append(said(outcome))
    assert streams == streams[:1] * 4


def test_a_model_whose_layers_all_slide_has_entries_without_rows() -> None:
    """No full layer, so the tree's blocks hold nothing: the tail is all that a hit needs, here and in the host tier."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(write_random_dense(Path(folder), dense_hf_config("mistral"), seed=7))
    one = build(model=model, host_tier_bytes=PLENTY)
    first = run_one(one, turn("first"))
    assert [(captured.kv_bytes, captured.state_bytes) for captured in first.captured] == [
        (0, one.state_bytes)
    ]
    for spilled in (False, True):
        if spilled:
            assert one.spill([entry.key for entry in one._cache.tree.entries()])
        again = run_one(one, turn(f"again {spilled}"))
        assert (said(again), again.cached_tokens) == (said(first), 448)
    assert one.stats().mismatches == 0
    baseline(one)
