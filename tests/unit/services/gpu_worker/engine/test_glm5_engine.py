"""Glm5SpecSession in the whole engine: a latent-attention trunk, drafts by its own head or by a block drafter."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Captured, DrafterOff, DrafterOffReason
from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.latent_config import GLM_LITE
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random_latent import latent_hf_config, write_random_latent
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sessions.glm5 import Glm5SpecSession
from tests.block_kit import drafter_of
from tests.engine_kit import GREEDY, WARM, Driver, Outcome, baseline, build, prompt, request, run_one

ALWAYS = EngineLimits(draft_cost=0.0, ngram_cost=0.0, floor=0.0, decode_ckpt_blocks=1)
STEPWISE = replace(ALWAYS, burst_rounds=1)
ARMS = ("mtp", "block")


@cache
def latent_model() -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(write_random_latent(Path(folder), latent_hf_config(GLM_LITE, vocab_size=512)))
    return replace(model, drafter=drafter_of(model, "dflash"))


def engine_of(limits: EngineLimits = ALWAYS, **fields: Any) -> Engine:
    return build(model=latent_model(), limits=limits, **fields)


def item(name: str = "r", length: int = 150, **fields: Any) -> GenerateRequest:
    return request(prompt(length, 1), name, **({"max_tokens": 30, "speculation_k": 4} | fields))


def plain(chosen: GenerateRequest) -> Outcome:
    return _plain(
        replace(chosen, drafter="none", speculation_k=0, use_cache=False, capture_at=None, request_id="plain")
    )


@cache
def _plain(chosen: GenerateRequest) -> Outcome:
    return run_one(engine_of(), chosen)


def session_of(engine: Engine) -> Glm5SpecSession:
    session = engine._active[0].session
    assert isinstance(session, Glm5SpecSession)
    return session


def context_of(engine: Engine) -> BlockContext:
    assert engine.runner.block is not None
    return engine.runner.block


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("arm", ARMS)
def test_c1_neither_arm_changes_a_token(arm: str, params: Any) -> None:
    engine, chosen = engine_of(), item(drafter=arm, sampling=params, top_logprobs=1)
    outcome, expected = run_one(engine, chosen), plain(chosen)
    assert outcome.tokens == expected.tokens
    assert outcome.logprobs == expected.logprobs
    assert outcome.end.telemetry.drafted > 0
    baseline(engine)


@pytest.mark.parametrize("arm", ARMS)
def test_r_g1_one_anchor_is_live_and_is_emitted_once(arm: str) -> None:
    engine = engine_of(STEPWISE)
    driver, chosen = Driver(engine), item(drafter=arm, sampling=WARM)
    driver.submit(chosen)
    while engine.has_work():
        driver.step()
        for stream in engine._active:
            session = stream.session
            assert isinstance(session, Glm5SpecSession)
            if not session.primed:
                continue
            assert session.pos == len(session.committed) == session.cache_ref.seq_len
            assert session.pos == stream.fed - 1, "all but the anchor is committed"
            assert session.pending_tok == stream.emitted[-1]
    outcome = driver.outcomes[chosen.key]
    offsets = [burst.offset for burst in outcome.bursts]
    assert offsets == sorted(set(offsets))
    assert outcome.tokens == plain(chosen).tokens


@pytest.mark.parametrize("arm", ARMS)
def test_r_g2_near_the_end_of_the_context_the_stream_ends_where_plain_decode_ends(arm: str) -> None:
    """The drafter goes at pos + K + 2 > max_ctx; a finished session says nothing more."""
    chosen = item(drafter=arm, max_tokens=40, sampling=WARM)
    engine = engine_of(STEPWISE, max_context=190)
    driver = Driver(engine)
    outcome = driver.run([chosen])[chosen.key]
    alone = run_one(engine_of(max_context=190), replace(chosen, drafter="none", speculation_k=0))
    assert outcome.tokens == alone.tokens
    assert outcome.end.reason == alone.end.reason
    (off,) = [event for event in driver.events if isinstance(event, DrafterOff)]
    assert off.reason is DrafterOffReason.CONTEXT


def test_r_g3_captures_wait_until_the_drafter_took_the_prompt_in() -> None:
    engine = engine_of(replace(STEPWISE, busy_burst_rounds=1), prefill_chunk=64)
    driver = Driver(engine)
    driver.submit(item(drafter="block", capture_at=64))
    seen = []
    while not driver.outcomes["r", 0].captured:
        if engine._active:
            session = session_of(engine)
            slot = session.sequence.ssm_slot_idx()
            assert not session.prefix_capture_ready
            assert session.take_prefix_capture() is None, "asking takes nothing"
            assert context_of(engine).ring.end(slot) == 0
            seen.append(len(session.boundary_captures))
        driver.step()
    assert max(seen) >= 1
    assert session_of(engine).rounds == 1
    assert [event.position for event in driver.outcomes["r", 0].captured] == [64, 128]
    context = context_of(engine)
    states = [entry.state for entry in engine._cache.tree.entries()]
    assert all(state is not None and context.has_tail(state.snapshot) for state in states)
    driver.run()
    again = run_one(engine, item("again", drafter="block"))
    assert again.cached_tokens == 128
    assert again.end.telemetry == driver.outcomes["r", 0].end.telemetry


def test_r_g3_on_the_native_arm_nothing_waits() -> None:
    engine = engine_of(STEPWISE)
    driver = Driver(engine)
    driver.submit(item(drafter="mtp"))
    driver.step()
    driver.step()
    assert [event.position for event in driver.events if isinstance(event, Captured)] == [128]


@pytest.mark.parametrize("budget", [0, 1])
def test_r_g3_a_session_that_ends_before_round_1_still_has_its_captures(budget: int) -> None:
    engine = engine_of()
    outcome = run_one(engine, item(drafter="block", max_tokens=budget))
    assert [event.position for event in outcome.captured] == [128]
    (entry,) = engine._cache.tree.entries()
    assert entry.state is not None
    assert context_of(engine).has_tail(entry.state.snapshot)
    baseline(engine)


class Breaks(Faults):
    """Round 1 does not fit into memory, once."""

    def __init__(self) -> None:
        self.left = 1

    def launched(self, phase: Phase, streams: Any) -> None:
        if phase == "verify" and self.left:
            self.left -= 1
            raise OutOfMemory("on purpose")


class GivesWay(Faults):
    def __init__(self, rows: int) -> None:
        self.rows: int | None = rows

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        due = self.rows is not None and rows >= self.rows
        if due:
            self.rows = None
        return due


@pytest.mark.parametrize(
    "faults", [Breaks, lambda: GivesWay(64), lambda: GivesWay(150), lambda: GivesWay(160)]
)
@pytest.mark.parametrize("arm", ARMS)
def test_c6_set_aside_at_any_time_no_capture_is_lost(arm: str, faults: Any) -> None:
    engine = engine_of(STEPWISE, faults=faults(), prefill_chunk=64)
    chosen = item(drafter=arm, sampling=WARM, capture_at=64)
    outcome = run_one(engine, chosen)
    assert outcome.tokens == plain(chosen).tokens
    assert {event.position for event in outcome.captured} >= {64}
    baseline(engine)


def test_r_g4_a_tail_is_exported_up_to_where_it_is_asked_for_or_not_at_all() -> None:
    engine = engine_of(STEPWISE)
    driver = Driver(engine)
    driver.submit(item(drafter="block"))
    for _ in range(4):
        driver.step()
    session = session_of(engine)
    tail = session.export_draft_tail(session.pos - 3)
    context = context_of(engine)
    dims = context.dims
    assert tail is not None
    assert tuple(tail.shape) == (2, dims.window + dims.block, dims.layers, dims.kv_heads, dims.head_dim)
    slot = session.sequence.ssm_slot_idx()
    newest = context.ring.tail(slot, session.pos - 3)
    assert torch.equal(tail, newest)
    assert session.export_draft_tail(session.pos + 1) is None, "not taken in"
    assert session.export_draft_tail(10) is None, "overwritten"
    native = engine_of(STEPWISE)
    other = Driver(native)
    other.submit(item(drafter="mtp"))
    for _ in range(4):
        other.step()
    assert session_of(native).export_draft_tail(128) is None, "the native arm has none"


@pytest.mark.parametrize("arm", ARMS)
def test_r_g5_what_a_deferred_publication_reads_does_not_change(arm: str) -> None:
    """Rows below a boundary, by the session's own reference to the sequence, from round 1 to the end."""
    engine = engine_of(STEPWISE)
    driver = Driver(engine)
    driver.submit(item(drafter=arm, sampling=WARM))
    for _ in range(3):
        driver.step()
    session = session_of(engine)
    reference = session.cache_ref
    assert reference is session.sequence
    before = engine.kv.read_rows(reference.block_table, 0, 128)
    for _ in range(8):
        driver.step()
    assert session.rounds > 4
    assert torch.equal(engine.kv.read_rows(reference.block_table, 0, 128), before)
    driver.run()


@pytest.mark.parametrize("arm", ARMS)
def test_c1_3_a_turn_goes_on_from_what_was_decoded(arm: str) -> None:
    def turns(drafter: str, k: int) -> tuple[list[int], list[int], int]:
        engine = engine_of()
        one = run_one(
            engine, item("one", 70, drafter=drafter, speculation_k=k, reuse="decode", max_tokens=21)
        )
        tokens = (*prompt(70, 1), *one.tokens, *prompt(90, 6))
        two = run_one(engine, request(tokens, "two", drafter=drafter, speculation_k=k, reuse="decode"))
        return one.tokens, two.tokens, two.cached_tokens

    assert turns(arm, 4) == turns("none", 0)


class DemoteAt(Faults):
    def demote(self, stream: StreamKey, rounds: int) -> bool:
        return rounds >= 2


@pytest.mark.parametrize("arm", ARMS)
def test_r_g6_sampled_streams_may_be_demoted_and_replayed_ones_not_yet(arm: str) -> None:
    chosen = item(drafter=arm, sampling=WARM, max_tokens=20)
    expected = plain(chosen).tokens
    engine = engine_of(STEPWISE, faults=DemoteAt())
    driver = Driver(engine)
    assert driver.run([chosen])[chosen.key].tokens == expected
    replayed = engine_of(STEPWISE)
    again = Driver(replayed)
    again.submit(replace(chosen, request_id="again", emitted=tuple(expected[:12])))
    while not (replayed._active and replayed._active[0].session.primed):
        again.step()
    session = session_of(replayed)
    assert not session.demote_eligible
    while session.completion.replaying:
        again.step()
    assert session.demote_eligible
    again.run()
    assert expected[12:] == again.outcomes["again", 0].tokens
    baseline(replayed)
