"""A short soak: every pool returns to its baseline and no stream differs; a fault of either kind is told."""

from __future__ import annotations

from services.bench.soak import Soak, run_soak
from services.prove.models import tiny


def test_c6_after_random_faults_cancels_and_preemptions_every_pool_is_at_its_baseline() -> None:
    results, bars = run_soak(tiny(), requests=40, seed=1)
    assert [bar.name for bar in bars if not bar.holds] == []
    assert results["left_in_pools"] == 0
    assert sum(results["ends"].values()) == 40


def test_a_stream_that_differs_is_counted() -> None:
    soak = Soak(tiny(), seed=2)
    for truth in soak._truth:
        truth.tokens[0] += 1
    soak.run(2, lambda _: None)
    assert soak.wrong >= 1
