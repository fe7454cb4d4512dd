"""Field reports on prefix caches of hybrid models, tried on the engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.limits import EngineLimits
from tests.engine_kit import WARM, Driver, build, cold, prompt, request, run_one

GRID = 64


def test_fr_6_prefill_beside_decode_captures_what_it_computes_alone() -> None:
    """Long prompts are primed while short ones decode; what was kept of them then answers as a cold run does."""
    longs = {f"long{i}": prompt(300 + 17 * i, seed=30 + i) for i in range(3)}
    engine = build(prefill_chunk=64, limits=EngineLimits(burst_rounds=2))
    driver = Driver(engine)
    for number in range(4):
        driver.submit(request(prompt(40, seed=number), f"short{number}", max_tokens=30, sampling=WARM))
    for name, tokens in longs.items():
        driver.submit(request(tokens, name, max_tokens=8))
    driver.run()
    for name, tokens in longs.items():
        expected = cold(tokens, max_tokens=8)
        hit = run_one(engine, request(tokens, f"{name} again", max_tokens=8))
        miss = run_one(engine, request(tokens, f"{name} cold", max_tokens=8, use_cache=False))
        assert hit.cached_tokens == len(tokens) // GRID * GRID
        assert driver.outcomes[name, 0].tokens == hit.tokens == miss.tokens == expected
    engine.check()


@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_fr_10_fr_11_every_turn_hits_as_far_with_speculation_as_without(k: int) -> None:
    engine = build(max_context=1024)
    history = prompt(400, seed=8)
    for turn in range(5):
        outcome = run_one(engine, request(history, f"turn{turn}", max_tokens=6, speculation_k=k))
        before = 400 + 45 * (turn - 1)
        assert outcome.cached_tokens == (before // GRID * GRID if turn else 0)
        history = (*history, *prompt(45, seed=100 + turn))
    engine.check()


def test_fr_13_every_repeat_hits_from_the_first_on() -> None:
    engine, tokens = build(), prompt(450, seed=5)
    cached = [run_one(engine, request(tokens, f"r{i}", max_tokens=3)).cached_tokens for i in range(4)]
    assert cached == [0, 448, 448, 448]


def test_fr_15_a_prompt_that_comes_while_its_twin_is_primed_computes_on_its_own() -> None:
    """The twin comes after the first chunk, and again after the capture that the broker has not granted."""
    tokens = prompt(300, seed=12)
    expected = cold(tokens, max_tokens=6)
    engine = build(prefill_chunk=64)
    driver = Driver(engine)
    driver.submit(request(tokens, "one", max_tokens=6))
    engine_events = engine.step()
    assert not any(type(event).__name__ == "Captured" for event in engine_events)
    driver.submit(request(tokens, "two", max_tokens=6))
    outcomes = driver.run()
    assert outcomes["two", 0].cached_tokens == 0
    assert outcomes["one", 0].tokens == outcomes["two", 0].tokens == expected
    engine.check()


class OnceAt(Faults):
    """The n-th prefill launch does not fit."""

    def __init__(self, launch: int) -> None:
        self._left = launch

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self._left -= phase == "prefill"
        if phase == "prefill" and self._left == 0:
            raise OutOfMemory("no room")


def test_fr_19_a_request_that_comes_back_uses_what_it_captured_itself() -> None:
    """Set aside at token 448 of 500, after its capture at 384: only the rest is computed again."""
    tokens = prompt(500, seed=14)
    engine = build(prefill_chunk=64, faults=OnceAt(7))
    outcome = run_one(engine, request(tokens, "r", max_tokens=6, ckpt_at=384))
    assert outcome.tokens == cold(tokens, max_tokens=6)
    assert engine.stats().set_aside == 1
    assert engine.stats().prefill_tokens == 7 * GRID + (500 - 384)
    assert outcome.cached_tokens == 0, "what usage says is the first admission's hit"
    engine.check()


def test_fr_20_work_a_turn_is_the_new_tokens_and_at_most_one_grid_step() -> None:
    """Twelve turns upon a long history, each of 30 to 151 new tokens."""
    engine = build(num_blocks=128, num_snapshots=16, max_context=2048)
    history = prompt(700, seed=20)
    run_one(engine, request(history, "start", max_tokens=2))
    for turn in range(12):
        new = prompt(30 + 11 * turn, seed=200 + turn)
        stable = len(history)
        history = (*history, *new)
        before = engine.stats().prefill_tokens
        outcome = run_one(engine, request(history, f"turn{turn}", max_tokens=2, speculation_k=turn % 4))
        work = engine.stats().prefill_tokens - before
        assert work == len(history) - outcome.cached_tokens
        assert len(new) <= work <= len(new) + GRID - 1
        assert stable - outcome.cached_tokens < GRID
    engine.check()
