"""The spec gate and the floor in the whole engine: who drafts, who is handed to plain decode, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.gpu_worker.engine.events import DrafterOff, DrafterOffReason
from services.gpu_worker.engine.faults import Faults, StreamKey
from services.gpu_worker.engine.limits import EngineLimits, SpecGate
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.streams import Stream
from tests.engine_kit import GREEDY, WARM, Driver, baseline, build, cold, prompt, request, run_one

GATED = EngineLimits(burst_rounds=2, spec_gate=SpecGate(low=2, high=4), draft_cost=0.0)
PENALISED = SamplingParams(seed=9, temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.1)


class DemoteAt(Faults):
    """Hands every stream over once it is so many rounds old."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def demote(self, stream: StreamKey, rounds: int) -> bool:
        return rounds >= self._rounds


def item(number: int, **fields: object) -> GenerateRequest:
    params = replace(WARM, seed=number) if number % 2 else GREEDY
    fields = {"max_tokens": 40, "sampling": params, "speculation_k": 3} | fields
    return request(prompt(70 + 9 * number, number), f"r{number}", **fields)


def offs(driver: Driver) -> dict[str, DrafterOffReason]:
    return {event.request_id: event.reason for event in driver.events if isinstance(event, DrafterOff)}


@pytest.mark.parametrize("params", [GREEDY, WARM, PENALISED], ids=["greedy", "sampled", "penalties"])
@pytest.mark.parametrize("rounds", [0, 1, 2, 5, 9])
def test_r_s17_demoted_after_any_round_the_stream_is_that_of_plain_decode(
    rounds: int, params: SamplingParams
) -> None:
    tokens = prompt(150, 1)
    engine = build(limits=EngineLimits(burst_rounds=1), faults=DemoteAt(rounds))
    outcome = run_one(
        engine, request(tokens, max_tokens=30, sampling=params, speculation_k=3, top_logprobs=2)
    )
    plain = run_one(build(), request(tokens, max_tokens=30, sampling=params, top_logprobs=2))
    assert outcome.tokens == plain.tokens
    assert outcome.logprobs == plain.logprobs
    assert outcome.end.reason == plain.end.reason
    baseline(engine)


def test_r_s17_a_demotion_costs_no_forward_of_its_own() -> None:
    engine = build(limits=EngineLimits(burst_rounds=1), faults=DemoteAt(3))
    verify, calls = engine.runner.verify, []

    def counted(rows: object) -> object:
        calls.append(rows)
        return verify(rows)

    engine.runner.verify = counted
    outcome = run_one(engine, request(prompt(100), max_tokens=30, speculation_k=3))
    telemetry = outcome.end.telemetry
    assert len(calls) == telemetry.rounds
    assert telemetry.rounds + telemetry.accepted + 1 == 30


def test_spec_gate_counts_queued_work_and_demotes_at_high() -> None:
    """Two speculate; two more come, of which one only waits: the projected load is four and all decode plainly."""
    engine = build(limits=GATED, max_batch=3)
    driver = Driver(engine)
    for number in (0, 1):
        driver.submit(item(number))
    driver.step()
    driver.step()
    assert engine.stats().speculating == 2
    for number in (2, 3):
        driver.submit(item(number))
    driver.step()
    assert engine.stats().waiting == 1
    assert engine.stats().speculating == 0
    assert {name: offs(driver)[name] for name in ("r0", "r1")} == dict.fromkeys(
        ("r0", "r1"), DrafterOffReason.LOAD
    )
    driver.run()
    assert set(offs(driver)) >= {"r0", "r1", "r2"}
    for number in range(4):
        chosen = item(number)
        alone = cold(chosen.tokens, max_tokens=40, sampling=chosen.sampling)
        assert driver.outcomes[chosen.key].tokens == alone
    baseline(engine)


def test_spec_gate_between_low_and_high_nothing_flips() -> None:
    engine = build(limits=GATED)
    driver = Driver(engine)
    for number in (0, 1):
        driver.submit(item(number, max_tokens=60))
    driver.step()
    driver.submit(item(2))
    driver.step()
    assert engine.stats().speculating == 2
    driver.run()
    assert offs(driver) == {"r2": DrafterOffReason.LOAD}


def test_spec_gate_admits_again_when_the_load_has_gone() -> None:
    driver = Driver(engine := build(limits=GATED))
    driver.run([item(number) for number in range(5)])
    driver.run([item(9)])
    assert "r9" not in offs(driver)
    assert driver.outcomes["r9", 0].end.telemetry.drafted > 0
    baseline(engine)


def test_r_s16_a_count_that_differs_lets_the_session_finish_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "fed", property(lambda stream: len(stream.request.tokens)))
    engine = build(limits=EngineLimits(burst_rounds=1), faults=DemoteAt(4))
    driver = Driver(engine)
    chosen = item(1)
    driver.submit(chosen)
    while engine.stats().rounds < 6:
        driver.step()
    (stream,) = engine._active
    assert isinstance(stream.session, SpecSession)
    assert not stream.session.demoted
    assert stream.in_place, "not tried again"
    driver.run()
    assert driver.outcomes[chosen.key].tokens == cold(chosen.tokens, max_tokens=40, sampling=chosen.sampling)
    assert offs(driver) == {}
    baseline(engine)


def test_a_stream_in_its_journal_is_not_handed_over_before_the_end_of_it() -> None:
    chosen = item(1)
    alone = cold(chosen.tokens, max_tokens=40, sampling=chosen.sampling)
    engine = build(limits=EngineLimits(burst_rounds=1), faults=DemoteAt(0))
    outcome = run_one(engine, replace(chosen, emitted=tuple(alone[:20])))
    assert outcome.tokens == alone[20:]
    assert outcome.end.telemetry.rounds < 30, "journalled tokens are verified several a round"


@pytest.mark.parametrize("surplus", [1, 4])
def test_r_s1_forced_overshoot_changes_nothing_that_is_told(surplus: int) -> None:
    class Overshoot(Faults):
        def overshoot(self, stream: StreamKey) -> int:
            return surplus

    chosen = item(2, max_tokens=11, speculation_k=7)
    engine = build(faults=Overshoot())
    outcome = run_one(engine, chosen)
    assert outcome.tokens == cold(chosen.tokens, max_tokens=11)
    assert outcome.end.completion_tokens == 11
    telemetry = outcome.end.telemetry
    assert telemetry.rounds + telemetry.accepted + 1 == 11
    baseline(engine)


def test_fr_22_a_drafter_under_the_floor_is_turned_off_and_says_so_once() -> None:
    engine = build(limits=EngineLimits(draft_cost=0.0, floor=4.5, floor_rounds=4))
    driver = Driver(engine)
    driver.run([item(1)])
    (off,) = [event for event in driver.events if isinstance(event, DrafterOff)]
    assert (off.request_id, off.drafter, off.reason) == ("r1", "mtp", DrafterOffReason.ACCEPTANCE)
    assert 1.0 <= off.tokens_per_verify < 4.5
    chosen = item(1)
    assert driver.outcomes[chosen.key].tokens == cold(chosen.tokens, max_tokens=40, sampling=chosen.sampling)
    assert driver.outcomes[chosen.key].end.telemetry.drafted <= 12


def test_r_s9_the_end_of_the_context_is_said_too() -> None:
    engine = build(max_context=128, num_blocks=8)
    driver = Driver(engine)
    driver.run([request(prompt(88), max_tokens=40, speculation_k=3)])
    assert offs(driver) == {"r": DrafterOffReason.CONTEXT}
