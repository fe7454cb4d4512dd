"""`auto`: the drafter with the most expected tokens a second, told with its reason; one that disappoints is replaced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.gpu_worker.engine.choice import PROBE_STREAMS, Choice
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import (
    Burst,
    ChoiceReason,
    DrafterChosen,
    DrafterOff,
    DrafterOffReason,
    Parked,
    Share,
)
from services.gpu_worker.engine.faults import Faults, StreamKey
from services.gpu_worker.engine.gain import FIRST, Gain, Pace
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import DrafterKind
from services.gpu_worker.engine.sessions.auto import AutoSpecSession
from services.gpu_worker.engine.trials import measured
from shared.clock import SYSTEM
from tests.block_kit import block_model
from tests.engine_kit import GREEDY, WARM, Driver, baseline, build, cold, prompt, request, run_one, tiny_model

KINDS: tuple[DrafterKind, ...] = ("block", "mtp", "ngram")
PACE = Pace(batch=4, plain=0.010, columns=8, full=0.013, draft=0.004, block=0.003)


def burst(kind: DrafterKind, tokens: float, drafts: int = 7, rounds: int = 1000) -> Burst:
    return Burst(
        request_id="r",
        choice=0,
        offset=0,
        tokens=(5,),
        logprobs=None,
        rounds=rounds,
        drafted=drafts * rounds,
        accepted=round((tokens - 1) * rounds),
        start_ns=0,
        end_ns=0,
        shares=(Share(kind, rounds, drafts * rounds, round((tokens - 1) * rounds)),),
    )


def choice(gain: Gain) -> Choice:
    return Choice(gain, KINDS, EngineLimits())


def test_the_gain_is_tokens_times_plain_over_drafting_and_verifying() -> None:
    gain = Gain([PACE])
    gain.learn([burst("block", 3.0), burst("mtp", 3.0), burst("ngram", 3.0)])
    expected = {"block": 0.003, "mtp": 7 * 0.004, "ngram": 0.0}
    for kind in KINDS:
        assert gain.of(kind, 1) == pytest.approx(3.0 * 0.010 / (expected[kind] + 0.013), rel=1e-3)


def test_the_best_measured_drafter_is_chosen() -> None:
    gain = Gain([PACE])
    assert choice(gain).choose(1, KINDS).drafter == "block", "by what the kinds usually bring"
    gain.learn([burst("block", 1.2), burst("ngram", 1.9)])
    chosen = choice(gain).choose(1, KINDS)
    assert dict(chosen.gains)["ngram"] == max(dict(chosen.gains).values())
    assert (chosen.drafter, chosen.reason) == ("mtp", ChoiceReason.GAIN), "an index offers itself"
    assert choice(gain).choose(1, ("block", "mtp")).drafter == "mtp", "among those that can serve"
    gain.learn([burst("mtp", 1.2, 3)])
    assert choice(gain).choose(1, KINDS).drafter == "ngram", "where no other pays"


def test_nothing_is_drafted_where_nothing_pays() -> None:
    gain = Gain([PACE])
    gain.learn([burst(kind, 1.05) for kind in KINDS])
    chosen = choice(gain).choose(1, KINDS)
    assert (chosen.drafter, chosen.reason) == ("none", ChoiceReason.NO_GAIN)
    assert len(chosen.gains) == 3
    assert choice(gain).choose(1, ()).drafter == "none"


def test_without_timed_launches_the_limits_costs_decide() -> None:
    limits = EngineLimits(draft_cost=0.35, ngram_cost=0.1, block_cost=0.5)
    chosen = Choice(Gain(), KINDS, limits).choose(1, KINDS)
    drafts, tokens = FIRST["block"]
    assert dict(chosen.gains)["block"] == pytest.approx(tokens / (1 + 0.5 + 0.1 * drafts))


def test_the_one_not_tried_for_longest_is_tried_now_and_then() -> None:
    chosen = [choice_of.drafter for choice_of in _sixty_four(choice(Gain([PACE])))]
    assert chosen.count("block") == 64 - 64 // PROBE_STREAMS
    assert set(chosen) == set(KINDS)


def _sixty_four(choosing: Choice) -> list:
    return [choosing.choose(1, KINDS) for _ in range(64)]


def engine_of(limits: EngineLimits) -> Engine:
    return build(model=block_model("dflash"), limits=limits)


def chosen_of(driver: Driver) -> list[tuple[str, ChoiceReason]]:
    return [(event.drafter, event.reason) for event in driver.events if isinstance(event, DrafterChosen)]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_c1_auto_changes_no_token_and_says_what_it_took(params: object) -> None:
    engine = engine_of(EngineLimits(floor=0.0, block_cost=0.2))
    driver = Driver(engine)
    item = request(prompt(100, 1), max_tokens=30, sampling=params, drafter="auto", speculation_k=7)
    driver.submit(item)
    driver.step()
    assert isinstance(engine._active[0].session, AutoSpecSession)
    driver.run()
    assert driver.outcomes[item.key].tokens == cold(item.tokens, max_tokens=30, sampling=params)
    assert chosen_of(driver)[0] == ("block", ChoiceReason.GAIN)
    baseline(engine)


@pytest.mark.parametrize("first", ["block", "mtp"])
@pytest.mark.parametrize("params", [GREEDY, replace(WARM, top_k=2)], ids=["greedy", "sampled"])
def test_a_stream_goes_on_with_the_drafter_that_pays(first: DrafterKind, params: object) -> None:
    """Random weights agree with nobody, text that repeats itself with the index: by the stream's own counts, so that a
    rerun does the same."""
    item = request(prompt(12, 5) * 8, max_tokens=90, sampling=params, drafter="auto", speculation_k=3)
    runs = []
    for _ in range(2):
        engine = engine_of(EngineLimits(floor=0.0, ngram_cost=0.02))
        engine._opener._choice._tried[first] = -1
        engine._opener._choice._streams = PROBE_STREAMS - 1
        driver = Driver(engine)
        runs.append(driver.run([item])[item.key])
        assert chosen_of(driver)[0] == (first, ChoiceReason.PROBE)
        assert ("ngram", ChoiceReason.SWITCH) in chosen_of(driver)
        baseline(engine)
    assert runs[0].tokens == cold(item.tokens, max_tokens=90, sampling=params)
    assert runs[0].end.telemetry == runs[1].end.telemetry
    asked = {share.drafter for burst in runs[0].bursts for share in burst.shares}
    assert asked == set(KINDS)
    telemetry = runs[0].end.telemetry
    assert sum(share.accepted for burst in runs[0].bursts for share in burst.shares) == telemetry.accepted


def test_where_rounds_follow_one_another_a_drafter_keeps_its_burst() -> None:
    """As on a card: a change within a burst would throw a round away that is on its way."""
    engine = engine_of(EngineLimits(floor=0.0, ngram_cost=0.02))
    engine._sessions._steady = True
    item = request(prompt(12, 5) * 8, max_tokens=120, sampling=WARM, drafter="auto", speculation_k=3)
    outcome = Driver(engine).run([item])[item.key]
    assert outcome.tokens == cold(item.tokens, max_tokens=120, sampling=WARM)
    assert all(len(burst.shares) == 1 for burst in outcome.bursts)
    assert len({share.drafter for burst in outcome.bursts for share in burst.shares}) > 1


class GivesWay(Faults):
    def __init__(self, *rows: int) -> None:
        self.rows = list(rows)

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        due = bool(self.rows) and rows >= self.rows[0]
        if due:
            del self.rows[0]
        return due


@pytest.mark.parametrize("interval", [0, 1])
def test_every_drafter_is_there_again_after_a_stream_was_set_aside(interval: int) -> None:
    limits = EngineLimits(floor=0.0, decode_ckpt_blocks=interval, burst_rounds=1)
    engine = build(model=block_model("dflash"), limits=limits, faults=GivesWay(100, 130, 161))
    driver = Driver(engine)
    item = request(prompt(90, 1), max_tokens=90, sampling=WARM, drafter="auto", speculation_k=4)
    outcome = driver.run([item])[item.key]
    assert outcome.tokens == cold(item.tokens, max_tokens=90, sampling=WARM)
    assert sum(isinstance(event, Parked) for event in driver.events) == 3
    baseline(engine)


def test_auto_beside_others_and_on_models_with_fewer_drafters() -> None:
    for model in (block_model("dflash"), tiny_model(), tiny_model(with_mtp=False)):
        engine = build(model=model, limits=EngineLimits(floor=0.0))
        items = [
            request(
                prompt(70 + 9 * n, n),
                f"{n}",
                max_tokens=40,
                sampling=replace(WARM, seed=n),
                drafter=kind,
                speculation_k=5,
            )
            for n, kind in enumerate(("auto", "none", "auto", "mtp"))
        ]
        outcomes = Driver(engine).run(items)
        for item in items:
            alone = run_one(build(model=model), replace(item, drafter="none", speculation_k=0))
            assert outcomes[item.key].tokens == alone.tokens
        baseline(engine)


def test_under_the_floor_every_drafter_goes() -> None:
    engine = engine_of(EngineLimits(floor=1.5, floor_rounds=16))
    driver = Driver(engine)
    item = request(prompt(100, 1), max_tokens=40, drafter="auto", speculation_k=4)
    assert driver.run([item])[item.key].tokens == cold(item.tokens, max_tokens=40)
    (off,) = [event for event in driver.events if isinstance(event, DrafterOff)]
    assert off.reason is DrafterOffReason.ACCEPTANCE


def test_a_request_that_names_its_drafter_keeps_it() -> None:
    engine = engine_of(EngineLimits(floor=1.4, floor_rounds=8))
    driver = Driver(engine)
    driver.run([request(prompt(100, 1), max_tokens=40, drafter="block", speculation_k=7)])
    assert chosen_of(driver) == []
    assert sum(isinstance(event, DrafterOff) for event in driver.events) == 1


def test_costs_are_the_tables_where_there_is_one() -> None:
    gain = Gain([PACE])
    assert gain.cost("mtp", 1) == pytest.approx((0.0, 0.3 / 7 + 0.4))
    assert gain.cost("block", 1) == pytest.approx((0.3, 0.3 / 7))
    assert gain.cost("ngram", 1) == pytest.approx((0.0, 0.3 / 7))
    assert Gain().cost("mtp", 1) is None


def test_launches_of_a_block_are_timed_with_the_others() -> None:

    engine = engine_of(EngineLimits())
    reset = engine._slot_memory.reset
    (pace,) = measured(engine.runner, batches=[2], columns=8, reset=reset, timer=SYSTEM.thread_ns)
    assert pace.block > 0
    assert pace.draft > 0
    engine.check()
