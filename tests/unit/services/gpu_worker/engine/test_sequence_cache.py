"""What sequences take from the cache, and how it comes back: R-Q rows, with the hit on the device and in the host tier."""

from __future__ import annotations

import pytest

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.requests import GenerateRequest
from shared.errors import BurstlineError
from tests.engine_kit import ROOT, Driver, baseline, build, prompt, request, run_one

TOKENS = prompt(300, seed=2)
HIT = 256


def item(name: str, **fields: object) -> GenerateRequest:
    return request((*TOKENS, *prompt(30, seed=3)), name, max_tokens=6, **fields)  # type: ignore[arg-type]


@pytest.fixture(params=["device", "host tier"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """An engine that knows TOKENS, and keeps them in one place or the other."""
    built = build(host_tier_bytes=10**8)
    captured = run_one(built, _first()).captured
    if request.param == "host tier":
        assert built.spill([event.key for event in captured]) == 1
    return built


def _first() -> GenerateRequest:
    return request(TOKENS, "first", max_tokens=2)


def look(engine: Engine, asked: GenerateRequest) -> int:
    hit = engine.lookup(asked.request_id, asked.root, asked.tokens, asked.chain)
    return hit.position if hit else 0


def test_r_q4_slots_blocks_and_references_are_given_back_once_on_every_way_out(engine: Engine) -> None:
    driver = Driver(engine)
    driver.run([item("finishes")])
    driver.submit(item("leaves"))
    engine.step()
    engine.cancel("leaves", "left")
    engine.cancel("leaves", "left twice")
    driver.run()
    driver.submit(item("never starts"))
    engine.cancel("never starts", "left")
    driver.run()
    baseline(engine)


def test_r_q5_only_the_first_lookup_decides_and_chunks_skip_below_it(engine: Engine) -> None:
    before = engine.stats().prefill_tokens
    outcome = run_one(engine, item("warm"))
    assert outcome.cached_tokens == HIT
    assert engine.stats().prefill_tokens - before == 330 - HIT


def test_r_q10_another_root_shares_nothing(engine: Engine) -> None:
    """A namespace, and with it an adapter, is part of the root of every chain key."""
    assert look(engine, item("ours")) == HIT
    assert look(engine, item("theirs", root=bytes([ROOT[0] ^ 1]) * 32)) == 0
    engine.drop_hit("ours")
    baseline(engine)


def test_r_q12_cached_tokens_are_zero_without_a_hit_and_at_most_the_whole_prompt(engine: Engine) -> None:
    whole = request(TOKENS[:HIT], "on the grid", max_tokens=2)
    assert run_one(engine, whole).cached_tokens == HIT == len(whole.tokens)
    assert run_one(engine, item("bypass", use_cache=False)).cached_tokens == 0


def test_r_q14_a_refused_submission_gives_the_references_back(engine: Engine) -> None:
    asked = item("refused", top_logprobs=-1)
    assert look(engine, asked) == HIT
    with pytest.raises(BurstlineError):
        engine.submit(asked)
    engine.drop_hit("refused")
    engine.drop_hit("refused")
    baseline(engine)


def test_r_q15_three_lookups_hold_what_one_holds(engine: Engine) -> None:
    asked = item("again and again")
    assert [look(engine, asked) for _ in range(3)] == [HIT] * 3
    engine.check()
    assert Driver(engine).run([asked])[asked.key].cached_tokens == HIT
    baseline(engine)
