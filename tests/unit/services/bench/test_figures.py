"""Ratios are taken within a repeat, and a drafter that changes a stream has no speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.bench import spec
from services.bench.figures import Pass, by_position, quantiles, summary
from services.bench.load import Arm, Load
from services.bench.spec import ARMS, BY_GAIN, PLAIN, StreamsDiffer, bars, run_spec
from services.gpu_worker.engine.models.loader import LoadedModel
from services.prove.models import tiny

PLAIN_PASS = Pass(
    streams=((1, 2), (3, 4)),
    decode_tokens=100,
    decode_seconds=2.0,
    cpu_rate=60.0,
    wall_seconds=3.0,
    forwards=50,
    rounds=100,
    drafted_at=(),
    accepted_at=(),
)
SPEC_PASS = replace(
    PLAIN_PASS,
    decode_seconds=1.0,
    cpu_rate=90.0,
    forwards=20,
    rounds=40,
    drafted_at=(40, 40),
    accepted_at=(36, 24),
)


def test_speed_up_is_the_median_of_ratios_within_repeats() -> None:
    slow, fast = replace(SPEC_PASS, decode_seconds=4.0), replace(SPEC_PASS, decode_seconds=0.5)
    baseline = [PLAIN_PASS, replace(PLAIN_PASS, decode_seconds=8.0), PLAIN_PASS]
    figures = summary([SPEC_PASS, slow, fast], baseline)
    assert figures["speed_up_over_plain"] == {"median": 2.0, "min": 2.0, "max": 4.0}
    assert figures["cpu_speed_up_over_plain"] == {"median": 1.5, "min": 1.5, "max": 1.5}
    assert figures["tokens_per_second"]["median"] == 100.0
    assert figures["tokens_per_verify"] == 2.5
    assert figures["trunk_forwards_per_token"] == 0.2
    assert figures["sequences_per_forward"] == 2.0
    assert figures["acceptance_by_position"] == [0.9, 0.6]


def test_counters_of_other_lengths_are_summed_by_position() -> None:
    assert by_position([(3, 2), (), (1, 1, 1)]) == (4, 3, 1)
    assert by_position([]) == ()


def test_repeats_are_interleaved_and_every_other_one_goes_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    names = {id(arm): name for name, arm in ARMS.items()}

    def measured(model: LoadedModel, load: Load, arm: Arm) -> Pass:
        ran.append(names[id(arm)])
        return PLAIN_PASS

    monkeypatch.setattr(spec, "measure", measured)
    results = run_spec(tiny(), [Load(rule="greedy", batch=1)], repeats=2)
    had = [
        name for name, arm in ARMS.items() if arm.drafting.kind != "block"
    ]  # this model has no such drafter
    assert ran == [*had, *reversed(had)]
    assert list(results) == ["greedy, batch 1"]
    assert [(bar.value, bar.holds) for bar in bars(results)] == [(1.0, True)] * 2


def test_other_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: LoadedModel, load: Load, arm: Arm) -> Pass:
        return PLAIN_PASS if arm is ARMS[PLAIN] else replace(SPEC_PASS, streams=((1, 2), (3, 5)))

    monkeypatch.setattr(spec, "measure", measured)
    with pytest.raises(StreamsDiffer, match="other tokens than plain"):
        run_spec(tiny(), [Load(rule="greedy", batch=1)], repeats=1)


def test_gates_that_let_speculation_cost_more_than_it_brings_break_a_bar() -> None:
    figures = {"cpu_speed_up_over_plain": {"median": 0.9}}
    best = {"cpu_speed_up_over_plain": {"median": 1.5}}
    results = {"greedy, batch 16": {PLAIN: best, BY_GAIN: figures, "mtp K=3": best}}
    (bar,) = bars(results)
    assert (bar.value, bar.holds) == (0.9, False)
    assert BY_GAIN in bar.name


def test_quantiles_are_values_that_occurred() -> None:
    assert quantiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0, "max": 3.0}
    assert quantiles(list(range(1, 201))) == {"p50": 100, "p99": 198, "max": 200}
