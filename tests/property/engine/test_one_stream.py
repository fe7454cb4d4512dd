"""One request has one stream (C1): whatever shares the batch, however bursts and chunks are cut, whatever is cached,
whoever drafts, whoever it is for, whenever a stream is demoted or set aside for lack of memory or for a newcomer.

Each example runs a random set of requests through one engine with random limits, with arrivals between steps, and
compares tokens and log probabilities with each request alone, cold, plain, in an engine of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.limits import EngineLimits, SpecGate
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from tests.engine_kit import (
    Driver,
    Outcome,
    build,
    prompt,
    request,
    run_one,
    tiny_model,
    window_model,
)

PARAMS = [
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2, temperature=1.0),
    SamplingParams(seed=3, temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(seed=4, temperature=0.0, frequency_penalty=0.6, presence_penalty=0.2, min_tokens=4),
]
MODELS = {"hybrid": tiny_model, "sliding": window_model}
PROMPTS = [
    prompt(200, 1),
    prompt(200, 1)[:140] + prompt(50, 2),
    prompt(200, 1)[:64] + prompt(5, 3),
    prompt(30, 4),
    prompt(128, 1),
]


def item(which: int, rule: int, budget: int) -> GenerateRequest:
    return request(
        PROMPTS[which],
        f"{which}-{rule}-{budget}",
        max_tokens=budget,
        sampling=PARAMS[rule],
        stop_ids=frozenset({100, 200}),
        top_logprobs=2,
    )


@cache
def truth(model: str, which: int, rule: int, budget: int) -> Outcome:
    return run_one(build(model=MODELS[model]()), replace(item(which, rule, budget), use_cache=False))


class Trouble(Faults):
    """Launches that do not fit, far enough apart that every stream gets on, and demotions out of turn."""

    def __init__(self, short: set[int], demote_at: int) -> None:
        self._short = short
        self._demote_at = demote_at
        self._launches = 0

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self._launches += 1
        if self._launches in self._short:
            raise OutOfMemory("no room")

    def demote(self, stream: StreamKey, rounds: int) -> bool:
        return rounds >= self._demote_at


Arrival = tuple[int, int, int, int, int, str, int, str]


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """(steps before it comes, prompt, rule, budget, drafts, drafter, journalled tokens, party)."""
    return draw(
        st.lists(
            st.tuples(
                st.integers(0, 3),
                st.integers(0, len(PROMPTS) - 1),
                st.integers(0, len(PARAMS) - 1),
                st.sampled_from([1, 7, 16]),
                st.integers(0, 7),
                st.sampled_from(["mtp", "ngram"]),
                st.integers(0, 16),
                st.sampled_from("abc"),
            ),
            min_size=1,
            max_size=5,
        )
    )


@given(
    model=st.sampled_from(sorted(MODELS)),
    plan=arrivals(),
    rounds=st.sampled_from([1, 2, 7, 32]),
    chunk=st.sampled_from([64, 128, 512]),
    granted=st.booleans(),
    blocks=st.sampled_from([5, 9, 64]),
    reserve=st.sampled_from([1, 64]),
    batch=st.sampled_from([1, 2, 8]),
    gate=st.sampled_from([None, SpecGate(low=1, high=2), SpecGate()]),
    short=st.sets(st.integers(0, 40), max_size=2),
    demote_at=st.sampled_from([0, 2, 5, 99]),
    checkpoints=st.sampled_from([0, 1]),
    host=st.sampled_from([0, 1 << 24]),
)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_c1_tokens_and_logprobs_are_those_of_the_request_alone(
    model: str,
    plan: list[Arrival],
    rounds: int,
    chunk: int,
    granted: bool,
    blocks: int,
    reserve: int,
    batch: int,
    gate: SpecGate | None,
    short: set[int],
    demote_at: int,
    checkpoints: int,
    host: int,
) -> None:
    limits = EngineLimits(
        burst_rounds=rounds,
        busy_burst_rounds=max(1, rounds // 2),
        spec_gate=gate,
        decode_reserve=reserve,
        decode_ckpt_blocks=checkpoints,
    )
    engine = build(
        model=MODELS[model](),
        limits=limits,
        prefill_chunk=chunk,
        num_blocks=blocks,
        max_batch=batch,
        host_tier_bytes=host,
        faults=Trouble(short, demote_at),
    )
    driver = Driver(engine, grant=lambda _: granted)
    expected: dict[tuple[str, int], tuple[Outcome, int]] = {}
    for number, (wait, which, rule, budget, drafts, drafter, known, party) in enumerate(plan):
        for _ in range(wait):
            driver.step()
        alone = truth(model, which, rule, budget)
        journal = tuple(alone.tokens[:known])
        chosen = replace(
            item(which, rule, budget),
            request_id=f"{number}",
            drafter=drafter,
            speculation_k=drafts,
            emitted=journal,
            party=party,
        )
        driver.submit(chosen)
        expected[chosen.key] = (alone, len(journal))
    outcomes = driver.run()
    for key, (alone, known) in expected.items():
        got = outcomes[key]
        assert got.tokens == alone.tokens[known:]
        assert got.logprobs == alone.logprobs[known:]
        assert (got.end.reason, got.end.stop_id) == (alone.end.reason, alone.end.stop_id)
        assert got.end.completion_tokens == alone.end.completion_tokens
    engine.check()
    stats = engine.stats()
    assert all(counts.owned == 0 for counts in (stats.blocks, stats.slots, stats.snapshots))
