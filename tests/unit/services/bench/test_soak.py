"""A short soak: every pool returns to its baseline and no stream differs; a fault of either kind is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.bench import soak as bench_soak
from services.bench.soak import Chance, Soak, run_soak
from services.gpu_worker.engine.faults import OutOfMemory, Phase, StreamKey
from services.prove.models import smallest


def test_c6_after_random_faults_cancels_and_preemptions_every_pool_is_at_its_baseline() -> None:
    results, bars = run_soak(smallest(), requests=40, seed=1)
    assert [bar.name for bar in bars if not bar.holds] == []
    assert results["left_in_pools"] == 0
    assert sum(results["ends"].values()) == 40


def test_a_stream_that_differs_is_counted() -> None:
    soak = Soak(smallest(), seed=2)
    for truth in soak._truth:
        truth.tokens[0] += 1
    soak.run(2, lambda _: None)
    assert soak.wrong >= 1


class _Full(Chance):
    """No launch fits."""

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        if len(streams) == 1:
            self.alone[streams[0][0]] += 1
        raise OutOfMemory("nothing fits")


def test_r_s8_overloaded_after_as_many_failures_alone_as_are_allowed_is_told_by_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_soak, "KINDS", 3)
    monkeypatch.setattr(bench_soak, "Chance", _Full)
    soak = Soak(smallest(), seed=3)
    soak.run(2, lambda _: None)
    assert soak.ends["overloaded"] >= 1
    assert soak.unexplained == []
    assert soak.left() == 0


def test_an_error_that_no_failed_launch_explains_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_soak, "KINDS", 3)
    monkeypatch.setattr(bench_soak, "Chance", _Full)
    monkeypatch.setattr("services.gpu_worker.engine.streams.MEMORY_RETRIES", 0)
    soak = Soak(smallest(), seed=3)
    soak.run(2, lambda _: None)
    assert len(soak.unexplained) == soak.ends["overloaded"] >= 1
    assert "overloaded: a step did not fit into memory 1 times" in soak.unexplained[0]
