"""Short soaks of any seed: whatever fails, is cancelled or gives way, streams are right and the pools whole (C6)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.bench import soak as bench_soak
from services.bench.soak import Soak
from services.prove.models import smallest

KINDS = 4
REQUESTS = 14


@given(seed=st.integers(0, 2**32))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_c6_a_soak_of_any_seed_gives_everything_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_soak, "KINDS", KINDS)
    soak = Soak(smallest(), seed)
    soak.run(REQUESTS, lambda _: None)
    assert sum(soak.ends.values()) == REQUESTS
    assert (soak.wrong, soak.unexplained) == (0, [])
    assert soak.left() == 0
