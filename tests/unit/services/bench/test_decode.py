"""The floor is a real forward, and the bar is that of one stream."""

from __future__ import annotations

import pytest

from services.bench import decode
from services.bench import load as bench_load
from services.bench.decode import bars, run_decode
from services.prove.models import tiny


def test_engine_and_floor_are_measured_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_load, "MAX_TOKENS", 6)
    monkeypatch.setattr(decode, "FLOOR_STEPS", 3)
    results = run_decode(tiny(), [1, 2], repeats=2)
    assert list(results) == ["batch 1", "batch 2"]
    for figures in results.values():
        assert figures["floor_tokens_per_second"]["min"] > 0
        assert figures["share_of_floor"]["median"] > 0


@pytest.mark.parametrize(("share", "holds"), [(0.9, True), (0.5, True), (0.49, False)])
def test_the_bar_is_for_one_stream(share: float, holds: bool) -> None:
    figures = {"share_of_floor": {"median": share}}
    (bar,) = bars({"batch 1": figures, "batch 16": {"share_of_floor": {"median": 0.1}}})
    assert bar.holds is holds
