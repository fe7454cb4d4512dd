"""The table by load has the drafters that the model has, and refuses streams that differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.bench import spec
from services.bench.figures import Pass
from services.bench.load import Arm, Load
from services.bench.spec import ARMS, StreamsDiffer, run_spec
from services.gpu_worker.engine.models.loader import LoadedModel
from services.prove.models import tiny, with_block

LOAD = Load(rule="greedy", batch=2)
Measure = Callable[[LoadedModel, Load, Arm], Pass]


def measuring(said: Callable[[Arm], int]) -> Measure:
    """Passes in which an arm says one token."""

    def measure(model: LoadedModel, load: Load, arm: Arm) -> Pass:
        return Pass(
            streams=((said(arm),),),
            decode_tokens=1,
            decode_seconds=1.0,
            cpu_rate=1.0,
            wall_seconds=1.0,
            forwards=1,
            rounds=1,
            drafted_at=(),
            accepted_at=(),
        )

    return measure


def test_a_model_is_measured_with_the_drafters_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "measure", measuring(lambda arm: 5))
    (figures,) = run_spec(tiny(), [LOAD], repeats=2).values()
    assert set(ARMS) - set(figures) == {"block K=7"}
    (figures,) = run_spec(with_block("tiny"), [LOAD], repeats=1).values()
    assert set(ARMS) == set(figures)


def test_streams_that_differ_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "measure", measuring(lambda arm: arm.drafting.k))
    with pytest.raises(StreamsDiffer, match="mtp K=1"):
        run_spec(tiny(), [LOAD], repeats=1)
