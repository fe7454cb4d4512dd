"""What speculation gains: the formula, the averages it is fed with, the timed launches, and the gate that asks it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.gpu_worker.engine.batch import VerifyRows
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Burst, DrafterOff, Share
from services.gpu_worker.engine.faults import OutOfMemory
from services.gpu_worker.engine.gain import Gain, Pace
from services.gpu_worker.engine.limits import EngineLimits, SpecGate
from services.gpu_worker.engine.runner import ModelRunner
from services.gpu_worker.engine.trials import BATCHES, gain_for
from shared.clock import SYSTEM, ManualClock
from tests.engine_kit import build, prompt, request, tiny_model

FAST = Pace(batch=4, plain=0.010, columns=8, full=0.013, draft=0.002)
SLOW = Pace(batch=16, plain=0.010, columns=8, full=0.030, draft=0.006)
GATE = SpecGate(low=1, high=2, least_gain=1.1)


def burst(rounds: int, drafted: int, accepted: int) -> Burst:
    return Burst(
        request_id="r",
        choice=0,
        offset=0,
        tokens=(5,),
        logprobs=None,
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        start_ns=0,
        end_ns=0,
        shares=(Share("mtp", rounds, drafted, accepted),),
    )


def test_the_gain_is_tokens_times_plain_over_what_a_round_takes() -> None:
    assert FAST.gain(7, 8) == pytest.approx(8 * 0.010 / (7 * 0.002 + 0.013))
    assert FAST.gain(0, 1) == pytest.approx(1.0)
    assert SLOW.gain(7, 8) == pytest.approx(8 * 0.010 / (7 * 0.006 + 0.030))


@given(drafts=st.floats(0, 7), tokens=st.floats(1, 8), more=st.floats(0.01, 1))
@settings(max_examples=50, deadline=None)
def test_more_tokens_gain_more_and_more_drafts_less(drafts: float, tokens: float, more: float) -> None:
    assert FAST.gain(drafts, tokens + more) > FAST.gain(drafts, tokens)
    assert FAST.gain(drafts + more, tokens) < FAST.gain(drafts, tokens)


def test_a_load_is_judged_by_the_smallest_batch_that_holds_it() -> None:
    gain = Gain([FAST, SLOW])
    assert gain.at(1) == gain.at(4) != gain.at(5) == gain.at(16) == gain.at(99)
    assert Gain().at(1) is None


def test_the_averages_follow_bursts_with_drafts_alone() -> None:
    gain = Gain([FAST])
    first = gain.at(1)
    gain.learn([burst(8, 0, 0)])
    assert gain.at(1) == first
    gain.learn([burst(8, 40, 40)] * 100)
    assert gain.at(1) == pytest.approx(FAST.gain(5, 6), rel=1e-3)
    gain.learn([burst(8, 40, 0)] * 100)
    assert gain.at(1) == pytest.approx(FAST.gain(5, 1), rel=1e-3)
    assert gain.at(1) < 1.0  # type: ignore[operator]


@pytest.mark.parametrize("gate", [None, SpecGate()])
def test_nothing_is_timed_for_a_gate_that_does_not_ask(gate: SpecGate | None) -> None:
    engine = build(limits=EngineLimits(spec_gate=gate))
    assert engine._gain.at(1) is None


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_timing_leaves_slots_empty_and_takes_no_more_than_there_are(batch: int) -> None:
    limits = EngineLimits(spec_gate=GATE)
    engine = build(limits=limits, num_slots=batch, max_batch=batch)
    assert engine._gain.at(1) is not None
    assert [engine.states.settled(slot) for slot in range(batch)] == [0] * batch
    assert not engine.states.state.any()
    counts = engine.stats()
    assert (counts.blocks.free, counts.slots.free) == (counts.blocks.total, counts.slots.total)


def test_every_batch_up_to_the_engines_own_is_timed() -> None:
    engine = build(num_slots=5, max_batch=5)
    config = EngineConfig(num_blocks=64, num_slots=5, num_snapshots=0, max_batch=5)
    gain = gain_for(GATE, engine.runner, config, engine._slot_memory.reset, ManualClock())
    assert [pace.batch for pace in gain._paces] == [1, 4, 5]
    assert max(BATCHES) > 5


def test_a_batch_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(num_slots=5, max_batch=5)
    verify = ModelRunner.verify

    def small(self: ModelRunner, rows: Sequence[VerifyRows]) -> list[Tensor]:
        if len(rows) > 4:
            raise OutOfMemory("too many")
        return verify(self, rows)

    monkeypatch.setattr(ModelRunner, "verify", small)
    config = EngineConfig(num_blocks=64, num_slots=5, num_snapshots=0, max_batch=5)
    gain = gain_for(GATE, engine.runner, config, engine._slot_memory.reset, ManualClock())
    assert [pace.batch for pace in gain._paces] == [1, 4]
    assert [engine.states.settled(slot) for slot in range(5)] == [0] * 5


class Busy(ManualClock):
    """A machine on which other work takes a second of every launch."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def monotonic_ns(self) -> int:
        raise AssertionError("wall time tells what others took")

    def thread_ns(self) -> int:
        self.launches += 1
        return SYSTEM.thread_ns()


def test_on_a_cpu_launches_are_timed_in_the_threads_own_time() -> None:
    engine = build(num_slots=1, max_batch=1)
    config = EngineConfig(num_blocks=64, num_slots=1, num_snapshots=0, max_batch=1)
    clock = Busy()
    gain = gain_for(GATE, engine.runner, config, engine._slot_memory.reset, clock)
    assert gain.at(1) is not None
    assert clock.launches > 0


def streams(engine: Engine, k: int) -> tuple[list[list[int]], int]:
    wanted = [request(prompt(70, seed), f"{seed}", speculation_k=k, max_tokens=20) for seed in range(4)]
    for one in wanted:
        engine.submit(one)
    said: dict[str, list[int]] = {one.request_id: [] for one in wanted}
    off = 0
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Burst):
                said[event.request_id].extend(event.tokens)
            off += isinstance(event, DrafterOff)
    return list(said.values()), off


@pytest.mark.parametrize(("pace", "pays"), [(FAST, True), (SLOW, False)])
def test_a_load_over_high_speculates_while_it_pays_and_says_the_same(
    pace: Pace, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = streams(build(), 0)
    engine = build(limits=EngineLimits(spec_gate=GATE, floor=0.0), model=tiny_model())
    monkeypatch.setattr(engine, "_gain", Gain([pace]))
    monkeypatch.setattr(Gain, "learn", lambda self, events: None)
    told, off = streams(engine, 3)
    assert told == plain
    assert (off == 0) is pays
