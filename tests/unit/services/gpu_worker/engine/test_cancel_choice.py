"""`Engine.cancel` of one choice: it ends, wherever it is, and the others say what they would have said."""

from __future__ import annotations

import pytest

from services.gpu_worker.engine.cancels import Cancel, Cancels
from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from tests.engine_kit import Driver, baseline, build, cold, prompt, request

TOKENS = prompt(150, seed=8)


def choices(count: int) -> list[GenerateRequest]:
    return [
        request(
            TOKENS,
            "many",
            choice=choice,
            max_tokens=40,
            sampling=SamplingParams(seed=choice),
            speculation_k=3,
        )
        for choice in range(count)
    ]


@pytest.mark.parametrize("slots", [1, 3], ids=["the others wait", "all run"])
@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("choice", [0, 2])
def test_one_choice_ends_and_the_others_go_on_unchanged(choice: int, step: int, slots: int) -> None:
    engine = build(limits=EngineLimits(burst_rounds=1), num_slots=slots, max_batch=slots)
    driver, items = Driver(engine), choices(3)
    for item in items:
        driver.submit(item)
    for _ in range(step):
        driver.step()
    engine.cancel("many", "not this one", choice)
    driver.run()
    for item in items:
        outcome = driver.outcomes[item.key]
        if item.choice == choice:
            assert (outcome.end.reason, outcome.end.detail) == (FinishReason.CANCELLED, "not this one")
            assert len(outcome.tokens) < 40
        else:
            assert outcome.end.reason is FinishReason.LENGTH
            assert outcome.tokens == cold(TOKENS, max_tokens=40, sampling=item.sampling, choice=item.choice)
    baseline(engine)


def test_all_choices_and_choices_that_there_are_not() -> None:
    engine = build()
    driver, items = Driver(engine), choices(3)
    for item in items:
        driver.submit(item)
    engine.cancel("many", "unknown", 7)
    engine.cancel("nobody", "unknown", 0)
    engine.cancel("many", "all")
    driver.run()
    assert {driver.outcomes[item.key].end.reason for item in items} == {FinishReason.CANCELLED}
    baseline(engine)


def test_a_cancellation_of_what_is_not_there_is_taken_by_an_idle_engine() -> None:
    engine = build()
    engine.cancel("nobody", "unknown")
    assert engine.has_work()
    assert engine.step() == []
    assert not engine.has_work()


def test_what_was_asked_is_taken_once_with_the_newest_reason() -> None:
    cancels = Cancels()
    cancels.ask(Cancel(request_id="r", choice=None, reason="first"))
    cancels.ask(Cancel(request_id="r", choice=None, reason="second"))
    cancels.ask(Cancel(request_id="r", choice=1, reason="one"))
    taken = list(cancels.take())
    assert sorted(cancel.reason for cancel in taken) == ["one", "second"]
    assert list(cancels.take()) == []
    assert not cancels
    one = next(cancel for cancel in taken if cancel.choice == 1)
    assert [one.covers(key) for key in (("r", 1), ("r", 0), ("s", 1))] == [True, False, False]
