"""FR-75: a caller leaves in the middle of a turn and sends the next one at once. What was said meanwhile is nowhere but where
the caller sends it back: the next turn goes on from the last finished turn, and says what it says without the left one."""

from __future__ import annotations

import pytest

from services.gpu_worker.engine.events import Burst, Captured, FinishReason
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest, ReuseKind, SamplingParams
from tests.engine_kit import GREEDY, WARM, Driver, Outcome, baseline, build, cold, prompt, request

LIMITS = EngineLimits(burst_rounds=4, decode_ckpt_blocks=1)
SAID = 14
FIRST, SECOND, THIRD = prompt(100, 1), prompt(70, 2), prompt(40, 3)


def turn(name: str, tokens: tuple[int, ...], reuse: ReuseKind, **fields: object) -> GenerateRequest:
    return request(tokens, name, reuse=reuse, labels=("session",), speculation_k=3, **fields)  # type: ignore[arg-type]


def leave_after_first_chunk(driver: Driver, item: GenerateRequest) -> tuple[int, ...]:
    """Ask, hear the first burst, and hang up; what was heard."""
    driver.submit(item)
    while not any(
        isinstance(event, Burst) and event.request_id == item.request_id for event in driver.step()
    ):
        pass
    driver.engine.cancel(item.request_id, "client_disconnected")
    return tuple(driver.outcomes[item.key].tokens)


def conversation(
    reuse: ReuseKind, sampling: SamplingParams, *, left: bool, sends_back: bool, heard: tuple[int, ...] = ()
) -> tuple[Driver, Outcome, GenerateRequest]:
    """A finished turn, one that is left (or not asked at all), and the next one at once."""
    driver = Driver(build(limits=LIMITS))
    one = turn("one", FIRST, reuse, max_tokens=SAID, sampling=sampling)
    said = tuple(driver.run([one])[one.key].tokens)
    history = (*FIRST, *said, *SECOND)
    if left:
        heard = leave_after_first_chunk(
            driver, turn("left", history, reuse, max_tokens=300, sampling=sampling)
        )
        assert heard
    tail = (*heard, *THIRD) if sends_back else THIRD
    last = turn("last", (*history, *tail), reuse, max_tokens=SAID, sampling=sampling)
    return driver, driver.run([last])[last.key], last


@pytest.mark.parametrize("sends_back", [False, True], ids=["keeps_silent", "sends_back"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_fr_75_the_next_turn_says_what_it_says_without_the_left_one(
    sampling: SamplingParams, sends_back: bool
) -> None:
    driver, outcome, last = conversation("exact", sampling, left=True, sends_back=sends_back)
    assert driver.outcomes["left", 0].end.reason is FinishReason.CANCELLED
    assert outcome.tokens == cold(last.tokens, max_tokens=SAID, sampling=sampling)
    assert outcome.end.reuse == "exact"
    assert outcome.cached_tokens >= 64, "the last finished turn is gone on from"
    baseline(driver.engine)


@pytest.mark.parametrize("reuse", ["exact", "decode"])
def test_fr_75_nothing_that_was_said_in_a_left_turn_is_kept(reuse: ReuseKind) -> None:
    driver, _, last = conversation(reuse, GREEDY, left=True, sends_back=True)
    captured = [
        event for event in driver.events if isinstance(event, Captured) and event.request_id == "left"
    ]
    prompt_rows = len(last.tokens) - len(THIRD) - len(driver.outcomes["left", 0].tokens)
    assert all(event.position <= prompt_rows for event in captured)
    baseline(driver.engine)


def test_fr_75_a_left_turn_of_decode_reuse_is_not_gone_on_from() -> None:
    """Its own rows are not parked: the next turn is the one of a conversation in which it was never asked, or an exact one."""
    driver, outcome, last = conversation("decode", GREEDY, left=True, sends_back=True)
    told = last.tokens[len(FIRST) + SAID + len(SECOND) : -len(THIRD)]
    assert told == tuple(driver.outcomes["left", 0].tokens[: len(told)])
    if outcome.end.reuse == "exact":
        assert outcome.tokens == cold(last.tokens, max_tokens=SAID)
    else:
        _, without, _ = conversation("decode", GREEDY, left=False, sends_back=True, heard=told)
        assert outcome.tokens == without.tokens
    baseline(driver.engine)
