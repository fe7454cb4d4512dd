"""Tokens that a journal knows are verified again, and no drafter's: a stream that is taken over, or gave way, counts them by
themselves, and its rounds, drafts and accepted drafts are those of the tokens that it decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import GenerateRequest
from tests.block_kit import block_model
from tests.engine_kit import WARM, Driver, Outcome, build, prompt, request, run_one
from tests.unit.services.gpu_worker.engine.test_glm5_engine import latent_model

ALWAYS = EngineLimits(draft_cost=0.0, ngram_cost=0.0, floor=0.0)
MODELS: dict[str, Callable[[], LoadedModel]] = {
    "hybrid": lambda: block_model("dflash2"),
    "confident": lambda: block_model("dspark"),
    "latent": latent_model,
}
WAYS = [("none", 0), ("mtp", 3), ("ngram", 4), ("block", 7), ("auto", 5)]
BUDGET = 30


def engine_of(model: str = "hybrid", **fields: Any) -> Engine:
    return build(model=MODELS[model](), limits=ALWAYS, **fields)


def item(**fields: Any) -> GenerateRequest:
    chosen: dict[str, Any] = {"max_tokens": BUDGET, "sampling": WARM}
    return request(prompt(150, 1), **(chosen | fields))


@cache
def plain(model: str = "hybrid") -> Outcome:
    return run_one(engine_of(model), item(drafter="none", use_cache=False))


@pytest.mark.parametrize(
    ("model", "drafter", "k", "known"),
    [(model, *way, 20) for model in MODELS for way in WAYS]
    + [("hybrid", *way, known) for way in WAYS[:2] for known in (1, BUDGET)],
)
def test_fr_111_what_the_journal_knows_is_nobodys_draft(model: str, drafter: Any, k: int, known: int) -> None:
    whole = plain(model)
    got = run_one(
        engine_of(model), item(drafter=drafter, speculation_k=k, emitted=tuple(whole.tokens[:known]))
    )
    told = got.end.telemetry
    assert got.tokens == whole.tokens[known:]
    assert told.replayed == known
    assert told.accepted <= told.drafted <= told.rounds * k
    # The first token that the journal has not is decided by a pass over its last one: at most one a stream is in no round.
    assert BUDGET - known - told.rounds - told.accepted in (0, 1)
    assert sum(told.drafted_at) == told.drafted
    assert sum(told.accepted_at) == told.accepted


def test_a_plain_stream_that_is_taken_over_drafted_nothing() -> None:
    engine = engine_of()
    outcome = run_one(engine, item(drafter="none", emitted=tuple(plain().tokens[:20])))
    told, stats = outcome.end.telemetry, engine.stats()
    assert (told.drafted, told.accepted, told.replayed) == (0, 0, 20)
    assert (stats.drafted, stats.accepted, stats.replayed, stats.rounds) == (0, 0, 20, told.rounds)
    assert all(burst.drafted == 0 and not burst.shares for burst in outcome.bursts)
    assert sum(burst.replayed for burst in outcome.bursts) == 20


def test_a_stream_that_is_not_taken_over_replays_nothing() -> None:
    outcome = run_one(engine_of(), item(drafter="mtp", speculation_k=3))
    assert outcome.end.telemetry.replayed == 0
    assert all(burst.replayed == 0 for burst in outcome.bursts)


class LosesVerify(Faults):
    """The twelfth verify launch does not fit."""

    def __init__(self) -> None:
        self.verifies = 0

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self.verifies += phase == "verify"
        if phase == "verify" and self.verifies == 12:
            raise OutOfMemory("made to fail")


def test_r_s12_a_stream_that_is_primed_again_counts_no_draft_twice() -> None:
    driver = Driver(engine_of(faults=LosesVerify()))
    chosen = item(drafter="none")
    outcome = driver.run([chosen])[chosen.key]
    told = outcome.end.telemetry
    assert outcome.tokens == plain().tokens
    assert (told.drafted, told.accepted) == (0, 0)
    assert told.replayed > 5


@pytest.mark.parametrize("reuse", ["exact", "decode"])
def test_a_journal_that_stands_is_replayed_too(reuse: Any) -> None:
    whole = plain()
    journal = tuple((token + 1) % 400 + 3 for token in whole.tokens[:9])
    stands = replace(item(emitted=journal, reuse=reuse), journal_stands=True)
    assert run_one(engine_of(), stands).end.telemetry.replayed == 9
