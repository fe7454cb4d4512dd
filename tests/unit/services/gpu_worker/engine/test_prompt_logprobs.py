"""Log probabilities of prompt tokens (R-Q20): one for every token but the first, the same however the prompt is primed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import PromptScored, TokenLogprob
from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sampling import token_logprob
from shared.errors import InvalidRequest
from tests.engine_kit import Driver, baseline, build, prompt, request

TEXTS = [prompt(length, seed) for seed, length in enumerate((1, 2, 63, 64, 65, 200, 330))]
TOP = 3


def scoring(tokens: Sequence[int], name: str = "r", **fields: object) -> GenerateRequest:
    return request(tokens, name, use_cache=False, prompt_logprobs=TOP, **({"max_tokens": 4} | fields))


def scores(driver: Driver, name: str = "r") -> list[TokenLogprob]:
    """What was told of a prompt, its pieces joined; they must follow one another."""
    entries: list[TokenLogprob] = []
    for event in driver.events:
        if isinstance(event, PromptScored) and event.request_id == name:
            assert event.offset == len(entries)
            entries.extend(event.entries)
    return entries


def run(engine: Engine, *items: GenerateRequest) -> Driver:
    driver = Driver(engine)
    driver.run(items)
    baseline(engine)
    return driver


@cache
def truth(which: int) -> list[TokenLogprob]:
    return scores(run(build(prefill_chunk=512), scoring(TEXTS[which])))


@pytest.mark.parametrize("which", range(len(TEXTS)))
def test_r_q20_every_token_but_the_first_has_one_entry_with_the_k_best(which: int) -> None:
    entries = truth(which)
    assert [entry.token for entry in entries] == list(TEXTS[which][1:])
    for entry in entries:
        best = [logprob for _, logprob in entry.top]
        assert len(best) == TOP
        assert best == sorted(best, reverse=True)
        assert entry.logprob <= best[0] < 0.0


def test_r_q20_an_entry_is_what_decode_would_say_of_the_same_token() -> None:
    """The row before the last prompt token decides that token for a prompt that ends there."""
    tokens = TEXTS[5]
    engine, rows = build(), []
    logits = engine.runner.logits

    def spy(hidden: object) -> object:
        rows.append(logits(hidden))
        return rows[-1]

    engine.runner.logits = spy  # type: ignore[method-assign, assignment]
    run(engine, request(tokens[:-1], use_cache=False, max_tokens=1))
    assert truth(5)[-1] == token_logprob(rows[0].numpy()[0], tokens[-1], TOP)


@pytest.mark.parametrize("chunk", [64, 128, 1024])
@pytest.mark.parametrize("k", [0, 3])
def test_fr_35_any_chunk_and_any_speculation_score_the_same_in_company(chunk: int, k: int) -> None:
    items = [scoring(text, f"{i}", speculation_k=k, max_tokens=12) for i, text in enumerate(TEXTS)]
    driver = run(build(prefill_chunk=chunk), *items)
    for which in range(len(TEXTS)):
        assert scores(driver, f"{which}") == truth(which)


def test_r_q20_such_a_request_bypasses_the_cache() -> None:
    engine = build()
    run(engine, request(TEXTS[6], "before"))
    with pytest.raises(InvalidRequest):
        engine.submit(replace(scoring(TEXTS[6]), use_cache=True))
    driver = run(engine, scoring(TEXTS[6]))
    assert driver.outcomes["r", 0].cached_tokens == 0
    assert scores(driver) == truth(6)


def test_r_q20_null_costs_no_row_of_logits() -> None:
    engine, asked = build(), []
    logits = engine.runner.logits

    def spy(hidden: object) -> object:
        asked.append(hidden)
        return logits(hidden)

    engine.runner.logits = spy  # type: ignore[method-assign, assignment]
    driver = run(engine, request(TEXTS[6], max_tokens=1))
    assert len(asked) == 1
    assert scores(driver) == []


class Breaks(Faults):
    """The third launch does not fit, and the stream gives way once at its 128th row."""

    def __init__(self) -> None:
        self._launches = 0
        self._ways = 1

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self._launches += 1
        if self._launches == 3:
            raise OutOfMemory("no room")

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        if rows < 128 or not self._ways:
            return False
        self._ways = 0
        return True


def test_r_q20_a_prompt_that_is_primed_again_is_told_once() -> None:
    engine = build(prefill_chunk=64, faults=Breaks())
    assert scores(run(engine, scoring(TEXTS[6]))) == truth(6)
    assert (engine.stats().set_aside, engine.stats().preempted) == (2, 1)


@pytest.mark.parametrize("which", range(len(TEXTS)))
def test_r_q20_a_request_that_says_nothing_scores_the_same_and_ends(which: int) -> None:
    driver = run(build(prefill_chunk=64), scoring(TEXTS[which], max_tokens=0))
    assert scores(driver) == truth(which)
    outcome = driver.outcomes["r", 0]
    assert (outcome.tokens, outcome.end.reason, outcome.end.completion_tokens) == ([], "length", 0)


def test_a_request_that_says_nothing_leaves_its_prompt_to_others() -> None:
    engine = build()
    run(engine, request(prompt(130), "primes", max_tokens=0))
    driver = run(engine, request(prompt(130), "speaks", max_tokens=4))
    assert driver.outcomes["speaks", 0].cached_tokens == 128
