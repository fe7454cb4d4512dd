"""The block drafter in the whole engine: the same stream by every way, its tail in everything that is kept."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import (
    Admitted,
    Captured,
    DrafterOff,
    DrafterOffReason,
    FinishReason,
    Parked,
    PromptScored,
)
from services.gpu_worker.engine.faults import Faults, StreamKey
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.gpu_worker.engine.sessions.block_context import LEAST_PROMPT
from services.gpu_worker.engine.sessions.dspark import DsparkSpecSession
from tests.block_kit import VARIANTS, block_model, drafter_of
from tests.engine_kit import (
    GREEDY,
    WARM,
    Driver,
    Outcome,
    baseline,
    build,
    cold,
    prompt,
    request,
    run_one,
    window_model,
)

ALWAYS = EngineLimits(ngram_cost=0.0, floor=0.0, decode_ckpt_blocks=1)
RICH = SamplingParams(seed=9, temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.1, top_k=40)
RULES = {"greedy": GREEDY, "sampled": WARM, "penalties": RICH}


def engine_of(variant: str = "dflash2", *, limits: EngineLimits = ALWAYS, **fields: Any) -> Engine:
    return build(model=block_model(variant), limits=limits, **fields)


def item(length: int = 150, name: str = "r", **fields: Any) -> GenerateRequest:
    return request(
        prompt(length, 1), name, **({"max_tokens": 30, "drafter": "block", "speculation_k": 7} | fields)
    )


def context_of(engine: Engine) -> BlockContext:
    assert engine.runner.block is not None
    return engine.runner.block


def plain(chosen: GenerateRequest) -> Outcome:
    return _plain(replace(chosen, drafter="none", speculation_k=0, use_cache=False, request_id="plain"))


@cache
def _plain(chosen: GenerateRequest) -> Outcome:
    return run_one(build(), chosen)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_c1_the_block_drafter_changes_no_token(variant: str, rule: str) -> None:
    engine, chosen = engine_of(variant), item(sampling=RULES[rule], top_logprobs=2)
    outcome, expected = run_one(engine, chosen), plain(chosen)
    assert outcome.tokens == expected.tokens
    assert outcome.logprobs == expected.logprobs
    assert outcome.end.telemetry.drafted > 0
    assert context_of(engine).passes > 10
    baseline(engine)


def test_c1_on_a_trunk_of_sliding_layers() -> None:
    target = window_model()
    model = replace(target, drafter=drafter_of(target))
    engine = build(model=model, limits=ALWAYS)
    chosen = item(sampling=WARM)
    outcome = run_one(engine, chosen)
    assert outcome.tokens == run_one(build(model=target), replace(chosen, drafter="none")).tokens
    assert outcome.end.telemetry.drafted > 0


def test_c1_drafters_of_every_kind_share_a_batch() -> None:
    engine = engine_of()
    kinds = ("none", "block", "mtp", "ngram", "block", "block")
    items = [
        item(70 + 9 * n, f"{n}", drafter=kind, speculation_k=3, sampling=replace(WARM, seed=n))
        for n, kind in enumerate(kinds)
    ]
    outcomes = Driver(engine).run(items)
    for chosen in items:
        assert outcomes[chosen.key].tokens == cold(chosen.tokens, max_tokens=30, sampling=chosen.sampling)
    baseline(engine)


def test_r_d1_rows_are_prompt_and_emitted_after_every_round() -> None:
    engine = engine_of(limits=replace(ALWAYS, burst_rounds=1))
    driver, chosen = Driver(engine), item(sampling=WARM)
    driver.submit(chosen)
    rounds = 0
    while engine.has_work():
        driver.step()
        for stream in engine._active:
            session = stream.session
            if not session.primed:
                continue
            assert isinstance(session, DsparkSpecSession)
            assert session.pos == session.cache.seq_len == stream.fed
            assert session.rounds - rounds in (0, 1)
            rounds = session.rounds
    bursts = driver.outcomes[chosen.key].bursts
    assert all(len(burst.tokens) == burst.accepted + burst.rounds for burst in bursts if burst.rounds)


def test_r_d2_a_hit_drafts_as_the_cold_prime_did() -> None:
    """The same drafts stand, round by round, whatever was cached."""
    engine = engine_of("dflash")
    chosen = item(sampling=WARM, max_tokens=60)
    first = run_one(engine, chosen)
    again = run_one(engine, replace(chosen, request_id="again"))
    assert again.cached_tokens == 128
    assert again.tokens == first.tokens
    assert again.end.telemetry == first.end.telemetry
    assert first.end.telemetry.accepted > 0


def test_fr_7_the_tail_goes_to_the_host_tier_and_comes_back() -> None:
    engine = engine_of("dflash", host_tier_bytes=10**9)
    chosen = item(sampling=WARM, max_tokens=60)
    first = run_one(engine, chosen)
    assert engine.spill([entry.key for entry in engine._cache.tree.entries()])
    again = run_one(engine, replace(chosen, request_id="again"))
    assert (again.cached_tokens, again.tokens) == (128, first.tokens)
    assert again.end.telemetry == first.end.telemetry


def test_r_d3_r_d5_entries_are_charged_for_the_tail_by_the_formula() -> None:
    """layers x (window + block) rows x KV heads x head x bytes x 2, beside what the trunk keeps."""
    engine, bare = engine_of(), build()
    assert engine.state_bytes - bare.state_bytes == 2 * (40 + 5) * 1 * 16 * 4 * 2
    driver = Driver(engine)
    driver.run([item()])
    captured = [event for event in driver.events if isinstance(event, Captured)]
    assert [event.state_bytes for event in captured] == [engine.state_bytes]
    entry = next(engine._cache.tree.entries())
    assert entry.state is not None
    assert context_of(engine).has_tail(entry.state.snapshot)


@pytest.mark.parametrize(("length", "max_context"), [(15, 1024), (150, 162)])
def test_r_d2_short_prompts_and_tight_contexts_get_another_session(length: int, max_context: int) -> None:
    """prompt >= 16 and prompt + block + 8 <= max_ctx, else never an error."""
    engine = engine_of(max_context=max_context)
    driver = Driver(engine)
    chosen = item(length, max_tokens=10)
    outcome = driver.run([chosen])[chosen.key]
    assert outcome.tokens == plain(chosen).tokens
    assert context_of(engine).passes == 0
    baseline(engine)


@pytest.mark.parametrize("budget", [1, 2, 3, 9])
def test_r_d4_a_finished_session_emits_nothing_more(budget: int) -> None:
    engine = engine_of(limits=replace(ALWAYS, burst_rounds=32))
    outcome = run_one(engine, item(max_tokens=budget))
    assert len(outcome.tokens) == budget
    assert outcome.end.reason is FinishReason.LENGTH
    baseline(engine)


@pytest.mark.parametrize("place", [0, 1, 4, 11])
def test_r_d1_a_stop_id_ends_where_plain_decode_ends(place: int) -> None:
    told = plain(item(sampling=WARM)).tokens
    stops = frozenset({told[place]})
    chosen = item(sampling=WARM, stop_ids=stops)
    engine = engine_of("dflash")
    outcome, expected = run_one(engine, chosen), plain(chosen)
    assert outcome.tokens == expected.tokens
    assert outcome.end.stop_id == expected.end.stop_id == told[place]
    assert outcome.end.completion_tokens == expected.end.completion_tokens
    baseline(engine)


class DemoteAt(Faults):
    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def demote(self, stream: StreamKey, rounds: int) -> bool:
        return rounds >= self._rounds


@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_r_d6_a_hand_off_never_fails_at_a_boundary(rounds: int) -> None:
    engine = engine_of(limits=replace(ALWAYS, burst_rounds=1), faults=DemoteAt(rounds))
    driver, chosen = Driver(engine), item(sampling=WARM, top_logprobs=1)
    outcome, expected = driver.run([chosen])[chosen.key], plain(chosen)
    assert (outcome.tokens, outcome.logprobs) == (expected.tokens, expected.logprobs)
    reasons = [event.reason for event in driver.events if isinstance(event, DrafterOff)]
    assert reasons == [DrafterOffReason.LOAD]
    baseline(engine)


class GiveWayAt(Faults):
    def __init__(self, *rows: int) -> None:
        self.rows = list(rows)

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        due = bool(self.rows) and rows >= self.rows[0]
        if due:
            del self.rows[0]
        return due


@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_fr_18_set_aside_in_mid_decode_it_comes_back_and_says_the_same(rule: str, interval: int) -> None:
    faults = GiveWayAt(153, 170, 171)
    engine = engine_of(
        "dflash", limits=replace(ALWAYS, burst_rounds=1, decode_ckpt_blocks=interval), faults=faults
    )
    driver, chosen = Driver(engine), item(sampling=RULES[rule], max_tokens=60)
    outcome = driver.run([chosen])[chosen.key]
    assert outcome.tokens == plain(chosen).tokens
    assert sum(isinstance(event, Parked) for event in driver.events) == 3
    assert sum(isinstance(event, Admitted) for event in driver.events) == 1
    assert outcome.end.telemetry.drafted > 0
    baseline(engine)


def test_a_stream_resumed_from_a_checkpoint_drafts_on() -> None:
    """Its tail was kept with the checkpoint: drafts stand after it as they would have without."""
    whole = run_one(engine_of("dflash"), item(sampling=WARM, max_tokens=60)).end.telemetry
    engine = engine_of("dflash", faults=GiveWayAt(160))
    parked = run_one(engine, item(sampling=WARM, max_tokens=60)).end.telemetry
    assert parked.accepted >= whole.accepted - 3


def test_r_d1_no_row_of_a_rejected_draft_is_taken_in() -> None:
    """What the ring holds after a stream are the features of exactly the rows that it said."""
    engine = engine_of("dflash", limits=replace(ALWAYS, burst_rounds=1))
    context, driver, chosen = context_of(engine), Driver(engine), item(sampling=WARM)
    driver.submit(chosen)
    for _ in range(12):
        driver.step()
    (stream,) = engine._active
    slot, position = stream.session.sequence.ssm_slot_idx(), stream.session.committed_len
    said = list(stream.session.committed)
    context.settle([slot])
    assert context.ring.end(slot) == position
    blocks, offsets = context.ring.places(slot, position - 20, position)
    rows = context.ring.k[:, blocks, :, offsets].clone()
    fresh = engine_of("dflash")
    run_one(fresh, request(said, max_tokens=0))
    other = context_of(fresh)
    blocks, offsets = other.ring.places(0, position - 20, position)
    assert torch.allclose(rows, other.ring.k[:, blocks, :, offsets], atol=1e-4)


def test_a_useless_drafter_is_turned_off_and_said_so() -> None:
    """FR-22: random weights never agree when nothing is sampled."""
    limits = EngineLimits(ngram_cost=0.0, floor=1.5, floor_rounds=8)
    engine = engine_of(limits=limits)
    driver, chosen = Driver(engine), item(max_tokens=40)
    outcome = driver.run([chosen])[chosen.key]
    assert outcome.tokens == plain(chosen).tokens
    (off,) = [event for event in driver.events if isinstance(event, DrafterOff)]
    assert off.reason is DrafterOffReason.ACCEPTANCE
    assert outcome.end.telemetry.drafted <= 8 * 4


def test_fr_8_an_entry_without_its_tail_serves_the_trunk_and_no_block() -> None:
    """A hit is the least of all groups: where the drafter's is missing, the drafter is refused before it drafts."""
    engine = engine_of()
    run_one(engine, item(name="first"))
    (entry,) = engine._cache.tree.entries()
    assert entry.state is not None
    context = context_of(engine)
    context._present[entry.state.snapshot] = False
    before = context.passes
    driver, chosen = Driver(engine), item(name="again", sampling=WARM)
    outcome = driver.run([chosen])[chosen.key]
    assert (outcome.cached_tokens, outcome.tokens) == (128, plain(chosen).tokens)
    assert context.passes == before
    (off,) = [event for event in driver.events if isinstance(event, DrafterOff)]
    assert off.reason is DrafterOffReason.DRAFT_ROWS


def test_a_prompt_too_short_for_a_block_drafter_is_told_as_that() -> None:
    reasons = {}
    for length in (LEAST_PROMPT - 1, LEAST_PROMPT):
        driver = Driver(engine_of())
        driver.run([item(length)])
        reasons[length] = [event.reason for event in driver.events if isinstance(event, DrafterOff)]
    assert reasons == {LEAST_PROMPT - 1: [DrafterOffReason.PROMPT], LEAST_PROMPT: []}


def test_fr_35_prompt_logprobs_are_those_of_plain_decode() -> None:
    def scored(engine: Engine, chosen: GenerateRequest) -> list[object]:
        driver = Driver(engine)
        driver.run([chosen])
        return [event.entries for event in driver.events if isinstance(event, PromptScored)]

    chosen = item(300, prompt_logprobs=2, use_cache=False)
    expected = scored(build(), replace(chosen, drafter="none", speculation_k=0))
    assert scored(engine_of(), chosen) == expected
    assert len(expected) == 3


def test_fr_40_drafts_that_break_the_mask_are_never_said() -> None:
    """Thirty masked streams at once; some masks leave few of a block's candidates, or none."""
    engine = engine_of(num_slots=30, max_batch=30, num_blocks=256)
    items = [
        item(
            40 + n,
            f"{n}",
            sampling=replace(WARM, seed=n, allowed_ids=frozenset(range(3 + n, 6 + n))),
            max_tokens=12,
        )
        for n in range(30)
    ]
    outcomes = Driver(engine).run(items)
    for chosen in items:
        assert chosen.sampling.allowed_ids is not None
        assert set(outcomes[chosen.key].tokens) <= chosen.sampling.allowed_ids
        assert outcomes[chosen.key].end.reason is FinishReason.LENGTH
    assert outcomes[items[3].key].tokens == plain(items[3]).tokens
    baseline(engine)


@pytest.mark.parametrize("drafter", ["block", "auto"])
def test_c1_3_a_turn_goes_on_from_what_was_decoded_and_drafts_on(drafter: str) -> None:
    """Its tail is kept with the turn, the rows up to the grid are taken in as any others: the block drafter never lacks
    its window. The same history gives the same stream, whoever drafted."""

    def turns(kind: str, k: int) -> tuple[list[int], list[int], int, int]:
        engine = engine_of("dflash", limits=replace(ALWAYS, draft_cost=0.0))
        one = run_one(engine, item(70, "one", drafter=kind, speculation_k=k, reuse="decode", max_tokens=21))
        tokens = (*prompt(70, 1), *one.tokens, *prompt(90, 6))
        passes = context_of(engine).passes
        second = request(tokens, "two", drafter=kind, speculation_k=k, reuse="decode", max_tokens=30)
        two = run_one(engine, second)
        baseline_but_parked(engine)
        return one.tokens, two.tokens, two.cached_tokens, context_of(engine).passes - passes

    expected, got = turns("none", 0), turns(drafter, 4)
    assert got[:3] == expected[:3]
    assert expected[2] > 64, "it went on off the grid"
    assert got[3] > 0


def baseline_but_parked(engine: Engine) -> None:
    engine.check()
    assert engine.stats().slots.owned == 0
