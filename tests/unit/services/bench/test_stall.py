"""A long prompt beside running streams: every step delivers to them, whatever the chunk budget."""

from __future__ import annotations

import pytest

from services.bench.stall import STREAMS, bars, measure, run_stall
from services.prove.models import smallest

LONG = 600


@pytest.mark.parametrize("chunk", [64, 256])
def test_running_streams_get_tokens_between_any_two_chunks(chunk: int) -> None:
    idle, busy = measure(smallest(), chunk=chunk, long=LONG)
    assert set(idle.rows) == {0}
    assert max(busy.rows) == chunk
    assert len(busy.rows) == STREAMS * -(-LONG // chunk)
    assert sum(busy.rows) == STREAMS * LONG


def test_without_chunks_the_whole_prompt_comes_between() -> None:
    results = run_stall(smallest(), long=LONG)
    assert results["at once"]["most_rows_between_deliveries"] == LONG
    assert results["chunk 128"]["deliveries_while_priming"] == STREAMS * 5


def test_a_bar_breaks_when_a_step_primes_more_than_its_budget() -> None:
    figures = {"idle_ms": {"p50": 1.0}, "while_priming_ms": {"max": 2.0}, "most_rows_between_deliveries": 513}
    whole = figures | {"while_priming_ms": {"max": 3.0}}
    rows, of_whole, over_idle = bars({"chunk 512": figures, "at once": whole})
    assert (rows.holds, of_whole.holds, over_idle.holds) == (False, False, True)
