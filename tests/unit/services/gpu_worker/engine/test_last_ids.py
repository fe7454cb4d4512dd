"""Ids that end a stream and are part of it (`last_ids`): what is said is the stream without them, up to the first of them,
whoever drafts, whatever the journal knows, and whatever the rules mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from shared.errors import InvalidRequest
from tests.block_kit import block_model
from tests.engine_kit import Driver, Outcome, baseline, build, prompt, request, run_one
from tests.unit.services.gpu_worker.engine.test_glm5_engine import latent_model

ALWAYS = EngineLimits(draft_cost=0.0, ngram_cost=0.0, floor=0.0, decode_ckpt_blocks=1)
MODELS: dict[str, Callable[[], LoadedModel]] = {
    "hybrid": lambda: block_model("dflash2"),
    "confident": lambda: block_model("dspark"),
    "latent": latent_model,
}
WAYS = [("none", 0), ("mtp", 3), ("ngram", 4), ("block", 7), ("auto", 5)]
RULES = {
    "sampled": SamplingParams(seed=3, temperature=0.9),
    "least and penalties": SamplingParams(seed=4, temperature=0.6, min_tokens=25, frequency_penalty=0.4),
}


def engine_of(model: str) -> Engine:
    return build(model=MODELS[model](), limits=ALWAYS)


def item(rule: str = "sampled", **fields: Any) -> GenerateRequest:
    chosen: dict[str, Any] = {
        "max_tokens": 30,
        "sampling": RULES[rule],
        "stop_ids": frozenset({7}),
        "top_logprobs": 1,
    }
    return request(prompt(150, 1), **(chosen | fields))


@cache
def plain(model: str, rule: str = "sampled") -> Outcome:
    return run_one(engine_of(model), item(rule, drafter="none", use_cache=False))


def last_of(whole: Outcome, place: int) -> tuple[frozenset[int], int]:
    """An id that ends the stream at `place` or before, and how many tokens are said with it."""
    token = whole.tokens[place]
    return frozenset({token}), whole.tokens.index(token) + 1


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("drafter", "k"), WAYS)
def test_the_stream_ends_with_the_first_of_them(model: str, drafter: Any, k: int) -> None:
    whole = plain(model)
    last, said = last_of(whole, 17)
    engine = engine_of(model)
    got = run_one(engine, item(drafter=drafter, speculation_k=k, last_ids=last))
    assert got.tokens == whole.tokens[:said]
    assert got.logprobs == whole.logprobs[:said]
    assert (got.end.reason, got.end.stop_id) == (FinishReason.STOP, None)
    assert got.end.completion_tokens == said
    baseline(engine)


@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("mtp", 3), ("block", 7)])
def test_neither_min_tokens_nor_penalties_keep_them_away(drafter: Any, k: int) -> None:
    whole = plain("hybrid", "least and penalties")
    last, said = last_of(whole, 12)
    got = run_one(
        engine_of("hybrid"), item("least and penalties", drafter=drafter, speculation_k=k, last_ids=last)
    )
    assert said < 25
    assert got.tokens == whole.tokens[:said]
    assert got.end.reason is FinishReason.STOP


@pytest.mark.parametrize("short", [0, 1, 5])
def test_fr_111_a_journal_that_holds_the_last_one_ends_without_another_token(short: int) -> None:
    whole = plain("hybrid")
    last, said = last_of(whole, 17)
    emitted = tuple(whole.tokens[: said - short])
    got = run_one(engine_of("hybrid"), item(drafter="mtp", speculation_k=3, last_ids=last, emitted=emitted))
    assert got.tokens == whole.tokens[said - short : said]
    assert (got.end.reason, got.end.completion_tokens) == (FinishReason.STOP, said)


def test_the_first_token_may_be_the_last() -> None:
    whole = plain("hybrid")
    last, _ = last_of(whole, 0)
    got = run_one(engine_of("hybrid"), item(last_ids=last))
    assert (got.tokens, got.end.completion_tokens) == (whole.tokens[:1], 1)


def test_a_turn_that_ended_so_is_gone_on_from() -> None:
    """`reuse: "decode"`: the last id is part of what was said, so it is a row of what the next turn finds."""
    whole = plain("hybrid")
    last, said = last_of(whole, 17)
    driver = Driver(engine_of("hybrid"))
    opted = item(drafter="mtp", speculation_k=3, last_ids=last, reuse="decode", labels=("talk",))
    first = driver.run([opted])[opted.key]
    tokens = (*opted.tokens, *first.tokens, *prompt(20, 9))
    second = replace(
        request(tokens, "second", max_tokens=8), reuse="decode", labels=("talk",), sampling=RULES["sampled"]
    )
    driver.run([second])
    assert driver.outcomes[second.key].cached_tokens == len(opted.tokens) + said


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="last_ids"):
        engine_of("hybrid").submit(item(last_ids=frozenset({512})))
