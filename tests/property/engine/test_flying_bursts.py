"""A round that flies from one burst into the next changes no stream (C1) and keeps nothing (C6).

Requests come, some with a journal, are cancelled in a round and between two bursts, interrupt bursts, do not fit into memory,
run out of blocks, are demoted and set aside, in any order, over a card that the CPU plays (`tests.card_kit`). Each stream is
what the request says alone, in plain decode on the CPU; a cancelled one is a beginning of that. After every step only streams
that go on have rows on their way, the books of their slots say what is committed, and every block and slot has its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.limits import EngineLimits, SpecGate
from services.gpu_worker.engine.requests import DrafterKind, GenerateRequest, SamplingParams
from tests.card_kit import Flights, play_card
from tests.engine_kit import Driver, baseline, build, prompt, request, run_one, tiny_model, window_model

RULES = [
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2, temperature=1.0),
    SamplingParams(seed=4, temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(seed=3, temperature=0.0, frequency_penalty=0.5),
]
"""The last one needs the stream's history: its rounds are the host's, beside those of the card."""
MODELS = {"hybrid": tiny_model, "sliding": window_model}
PROMPTS = [prompt(150, 1), prompt(150, 1)[:64] + prompt(9, 3), prompt(30, 4)]
BUDGETS = (1, 9, 34, 70)


def item(which: int, rule: int, budget: int) -> GenerateRequest:
    return request(
        PROMPTS[which],
        max_tokens=budget,
        sampling=RULES[rule],
        stop_ids=frozenset({100, 200, 300}),
    )


@cache
def longest(model: str, which: int, rule: int) -> list[int]:
    """On the CPU, alone, without a card."""
    alone = replace(item(which, rule, max(BUDGETS)), use_cache=False)
    return run_one(build(model=MODELS[model]()), alone).tokens


def truth(model: str, which: int, rule: int, budget: int) -> list[int]:
    """A stream with a larger budget says the same, and more."""
    return longest(model, which, rule)[:budget]


class Script(Faults):
    """What happens at which launch, while a round may be on its way."""

    def __init__(self, acts: dict[int, str], demote_at: int, ways: set[int]) -> None:
        self.acts, self.demote_at, self.ways = acts, demote_at, ways
        self.launches = self.asked = 0
        self.do: Callable[[str, StreamKey], None] = lambda act, stream: None

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self.launches += 1
        act = self.acts.get(self.launches)
        if act == "memory":
            raise OutOfMemory("no room")
        if act is not None:
            self.do(act, streams[-1])

    def demote(self, stream: StreamKey, rounds: int) -> bool:
        return rounds >= self.demote_at

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        self.asked += 1
        return self.asked in self.ways


@dataclass
class Play:
    """A worker that watches what flies."""

    engine: Engine
    flights: Flights
    script: Script
    leaves: set[int]
    """Steps before which a running stream is cancelled."""
    steps: int = 0
    cancelled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.driver = Driver(self.engine)
        self.script.do = self.act

    def act(self, what: str, stream: StreamKey) -> None:
        if what == "interrupt":
            self.engine.interrupt()
        else:
            self.cancelled.add(stream[0])
            self.engine.cancel(stream[0], "no more")

    def step(self) -> None:
        self.steps += 1
        if self.steps in self.leaves and self.engine._active:
            self.act("cancel", self.engine._active[0].key)
        self.driver.step()
        running = {
            stream.session.sequence.ssm_slot_idx(): stream for stream in self.engine._active if stream.going
        }
        assert self.flights.flying <= running.keys(), "what flies belongs to streams that go on"
        states = self.engine.states
        for slot, stream in running.items():
            assert states.position(slot) + states.fold(slot) == stream.session.committed_len
        self.engine.check()

    def end(self) -> None:
        for _ in range(500):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work()
        assert not self.flights.flying
        baseline(self.engine)


Arrival = tuple[int, int, int, int, int, DrafterKind, int]
ARRIVAL = st.tuples(
    st.integers(0, 4),
    st.integers(0, len(PROMPTS) - 1),
    st.integers(0, len(RULES) - 1),
    st.sampled_from(BUDGETS),
    st.sampled_from([0, 0, 3]),
    st.sampled_from(["mtp", "ngram"]),
    st.sampled_from([0, 0, 6]),
)
ACTS = st.dictionaries(
    st.integers(1, 60), st.sampled_from(["cancel", "interrupt", "interrupt", "memory"]), max_size=6
)


@given(
    model=st.sampled_from(sorted(MODELS)),
    plan=st.lists(ARRIVAL, min_size=1, max_size=5),
    rounds=st.sampled_from([1, 2, 5]),
    acts=ACTS,
    demote_at=st.sampled_from([5, 99, 99]),
    ways=st.sets(st.integers(1, 30), max_size=2),
    leaves=st.sets(st.integers(1, 30), max_size=1),
    checkpoints=st.sampled_from([0, 1]),
    blocks=st.sampled_from([6, 64]),
    slots=st.sampled_from([2, 3]),
    gate=st.sampled_from([None, SpecGate(low=1, high=2)]),
)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_c1_rounds_that_fly_on_change_no_stream(
    model: str,
    plan: list[Arrival],
    rounds: int,
    acts: dict[int, str],
    demote_at: int,
    ways: set[int],
    leaves: set[int],
    checkpoints: int,
    blocks: int,
    slots: int,
    gate: SpecGate | None,
) -> None:
    expected = [truth(model, *arrival[1:4]) for arrival in plan]
    script = Script(acts, demote_at, ways)
    with pytest.MonkeyPatch.context() as patch:
        flights = play_card(patch)
        limits = EngineLimits(burst_rounds=rounds, decode_ckpt_blocks=checkpoints, spec_gate=gate)
        engine = build(
            model=MODELS[model](),
            limits=limits,
            faults=script,
            num_blocks=blocks,
            num_slots=slots,
            max_batch=slots,
        )
        play = Play(engine, flights, script, leaves)
        for number, (wait, which, rule, budget, drafts, drafter, said) in enumerate(plan):
            for _ in range(wait):
                play.step()
            chosen = replace(
                item(which, rule, budget),
                request_id=f"{number}",
                speculation_k=drafts,
                drafter=drafter,
                emitted=tuple(expected[number][:said]),
            )
            play.driver.submit(chosen)
        play.end()
    for number, (arrival, stream) in enumerate(zip(plan, expected, strict=True)):
        tokens = stream[arrival[-1] :]
        outcome = play.driver.outcomes[f"{number}", 0]
        if outcome.end.reason is FinishReason.CANCELLED:
            assert f"{number}" in play.cancelled
            assert outcome.tokens == tokens[: len(outcome.tokens)]
        else:
            assert outcome.tokens == tokens
