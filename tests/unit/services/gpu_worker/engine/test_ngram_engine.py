"""The n-gram drafter in the whole engine: any model, the same stream, faster where text repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.gpu_worker.engine.events import DrafterOff, DrafterOffReason
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import SamplingParams
from tests.engine_kit import GREEDY, WARM, Driver, baseline, build, cold, prompt, request, run_one, tiny_model

ALWAYS = EngineLimits(ngram_cost=0.0, floor=0.0)
NARROW = SamplingParams(seed=4, temperature=0.6, top_k=3)
"""Few ids, so that the random model repeats itself."""


@pytest.mark.parametrize("with_mtp", [True, False], ids=["with a head", "without a head"])
@pytest.mark.parametrize("params", [GREEDY, WARM, NARROW], ids=["greedy", "sampled", "narrow"])
@pytest.mark.parametrize("k", [1, 5])
def test_c1_the_ngram_drafter_changes_no_token(k: int, params: SamplingParams, with_mtp: bool) -> None:
    model = tiny_model(with_mtp=with_mtp)
    item = request(
        prompt(40, 2) * 3, max_tokens=40, sampling=params, drafter="ngram", speculation_k=k, top_logprobs=1
    )
    engine = build(model=model, limits=ALWAYS)
    outcome = run_one(engine, item)
    plain = run_one(build(model=model), replace(item, drafter="none"))
    assert outcome.tokens == plain.tokens
    assert outcome.logprobs == plain.logprobs
    baseline(engine)


def test_text_said_before_in_the_namespace_is_accepted_whole() -> None:
    engine = build(limits=ALWAYS)
    item = request(prompt(70, 2), max_tokens=40, sampling=WARM, drafter="ngram", speculation_k=7)
    first = run_one(engine, item).end.telemetry
    again = run_one(engine, replace(item, request_id="again")).end.telemetry
    other = run_one(
        engine, replace(item, request_id="elsewhere", root=b"z" * 32, use_cache=False, chain=item.chain)
    )
    assert again.accepted == again.drafted > 30
    assert again.rounds < first.rounds / 3
    assert other.end.telemetry.rounds == first.rounds, "another namespace knows nothing of it (C4)"


def test_a_request_that_bypasses_the_cache_leaves_no_trace() -> None:
    engine = build(limits=ALWAYS)
    item = request(
        prompt(70, 2), max_tokens=40, sampling=WARM, drafter="ngram", speculation_k=7, use_cache=False
    )
    first = run_one(engine, item).end.telemetry
    assert run_one(engine, replace(item, request_id="again")).end.telemetry == first


def test_the_head_is_not_asked() -> None:
    engine = build(limits=ALWAYS)

    def never(rows: object) -> object:
        raise AssertionError("no draft row is due")

    engine.runner.draft = never
    outcome = run_one(
        engine, request(prompt(30, 2) * 3, max_tokens=30, sampling=NARROW, drafter="ngram", speculation_k=3)
    )
    assert len(outcome.tokens) == 30


def test_drafters_of_every_kind_share_a_batch() -> None:
    engine = build(limits=ALWAYS)
    kinds = ("none", "mtp", "ngram", "mtp", "ngram")
    items = [
        request(
            prompt(80 + number, number),
            f"{number}",
            max_tokens=30,
            sampling=replace(NARROW, seed=number),
            drafter=kind,
            speculation_k=3,
        )
        for number, kind in enumerate(kinds)
    ]
    outcomes = Driver(engine).run(items)
    for item in items:
        assert outcomes[item.key].tokens == cold(item.tokens, max_tokens=30, sampling=item.sampling)
    assert outcomes["0", 0].end.telemetry.drafted == 0
    assert outcomes["1", 0].end.telemetry.drafted > 0
    baseline(engine)


def test_a_head_that_the_model_does_not_have_is_plain_decode_and_told() -> None:
    driver = Driver(build(model=tiny_model(with_mtp=False)))
    outcome = driver.run([request(prompt(70), speculation_k=3)])["r", 0]
    assert outcome.end.telemetry.drafted == 0
    (told,) = [event for event in driver.events if isinstance(event, DrafterOff)]
    assert (told.drafter, told.reason) == ("mtp", DrafterOffReason.ABSENT)
