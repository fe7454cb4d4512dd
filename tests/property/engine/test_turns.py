"""Conversations of `reuse = "decode"`: the same history gives the same stream, however it is had; who was not served so
says what a cold run says (C1.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from tests.engine_kit import Driver, Outcome, build, prompt, request, run_one

RULES = [
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2, temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.3),
]
POOLS = {"num_blocks": 128, "num_snapshots": 64}
Turn = tuple[int, int]
"""(new tokens, budget)."""


class Trouble(Faults):
    """Launches that do not fit, and turns that are set aside when they have so many rows."""

    def __init__(self, short: set[int], rows: Sequence[int]) -> None:
        self._short = short
        self._rows = sorted(rows)
        self._launches = 0

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self._launches += 1
        if self._launches in self._short:
            raise OutOfMemory("no room")

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        due = bool(self._rows) and rows >= self._rows[0]
        if due:
            del self._rows[0]
        return due


def have(
    engine: Engine, turns: Sequence[Turn], sampling: SamplingParams, *, company: int = 0, **drafting: object
) -> list[tuple[GenerateRequest, Outcome]]:
    """All turns, each with what it was asked and what it said."""
    driver, tokens, told = Driver(engine), (), []
    for number, (fresh, budget) in enumerate(turns):
        tokens = (*tokens, *prompt(fresh, 100 + number))
        item = request(
            tokens,
            f"turn{number}",
            max_tokens=budget,
            sampling=sampling,
            stop_ids=frozenset(range(40, 60)),
            top_logprobs=1,
            reuse="decode",
            **drafting,
        )
        others = [request(prompt(50 + n, n), f"other{number}-{n}", max_tokens=9) for n in range(company)]
        told.append((item, driver.run([*others, item])[item.key]))
        tokens = (*tokens, *told[-1][1].tokens)
    engine.check()
    return told


@given(
    turns=st.lists(st.tuples(st.integers(1, 140), st.integers(1, 40)), min_size=2, max_size=4),
    rule=st.sampled_from(RULES),
    k=st.integers(0, 6),
    drafter=st.sampled_from(["mtp", "ngram"]),
    rounds=st.sampled_from([1, 3, 16]),
    chunk=st.sampled_from([64, 128, 512]),
    columns=st.sampled_from([1, 3, 8]),
    company=st.integers(0, 2),
    checkpoints=st.sampled_from([0, 1]),
    short=st.sets(st.integers(1, 60), max_size=2),
    rows=st.lists(st.integers(20, 400), max_size=3),
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_c1_3_the_same_history_gives_the_same_stream(
    turns: list[Turn],
    rule: SamplingParams,
    k: int,
    drafter: str,
    rounds: int,
    chunk: int,
    columns: int,
    company: int,
    checkpoints: int,
    short: set[int],
    rows: list[int],
) -> None:
    reference = have(build(limits=EngineLimits(burst_rounds=1), prefill_chunk=64, **POOLS), turns, rule)
    limits = EngineLimits(burst_rounds=rounds, decode_ckpt_blocks=checkpoints)
    engine = build(
        limits=limits, prefill_chunk=chunk, max_verify=columns, faults=Trouble(short, rows), **POOLS
    )
    got = have(engine, turns, rule, company=company, speculation_k=k, drafter=drafter)
    for (_, expected), (asked, outcome) in zip(reference, got, strict=True):
        if (
            outcome.end.reuse != expected.end.reuse
        ):  # the launch that would have kept the turn before did not fit
            alone = run_one(build(), replace(asked, use_cache=False, reuse="exact", speculation_k=0))
            assert short
            assert outcome.end.reuse == "exact"
            assert outcome.tokens == alone.tokens
            return
        assert (outcome.tokens, outcome.logprobs) == (expected.tokens, expected.logprobs)
        assert outcome.end.cached_tokens == expected.end.cached_tokens
