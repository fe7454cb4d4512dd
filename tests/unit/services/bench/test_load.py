"""One measured pass on the tiny model: what is counted, and that drafters see the same load."""

from __future__ import annotations

import pytest

from services.bench import load as bench_load
from services.bench.load import Load, measure
from services.bench.spec import ARMS
from services.prove.models import tiny


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_load, "MAX_TOKENS", 8)


@pytest.mark.parametrize("rule", ["greedy", "sampled"])
def test_plain_decode_is_one_forward_a_token_and_drafters_give_the_same_streams(rule: str) -> None:
    load = Load(rule=rule, batch=1)
    plain = measure(tiny(), load, ARMS["none"])
    drafted = measure(tiny(), load, ARMS["mtp K=3"])
    assert plain.forwards == plain.rounds
    # The first token of a stream comes from its prefill; a stop id is decided by a forward and not delivered.
    assert plain.decode_tokens - len(plain.streams) <= plain.forwards <= plain.decode_tokens
    assert drafted.streams == plain.streams
    assert drafted.forwards <= plain.forwards
    assert drafted.drafted_at[0] > 0


def test_a_batch_shares_its_forwards() -> None:
    one = measure(tiny(), Load(rule="greedy", batch=4), ARMS["none"])
    assert len(one.streams) == 8
    assert one.forwards < one.rounds
