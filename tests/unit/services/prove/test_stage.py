"""Every value of the table does what its name says, on an engine that is sound, broken or stuck."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from services.gpu_worker.engine.engine import Engine
from services.prove.axes import AXES, CACHES, WAYS, Cell
from services.prove.reference import References
from services.prove.stage import Outcome, Stage

CELL = replace(
    Cell(**{axis: next(iter(values)) for axis, values in AXES.items()}),
    model="tiny",
    prompt="tool call",
    rule="few ids",
    budget="32 tokens",
    drafter="mtp K=3",
    chunk="chunk 128",
)
DEEPEST = 192
FOUND = {
    "cold": 0,
    "miss": 0,
    "hit at 64": 64,
    "hit halfway": 64,
    "deepest hit": DEEPEST,
    "hit after a split": 64,
    "hit after eviction": DEEPEST,
    "hit on a state that came back": 64,
    "next turn of a session": DEEPEST,
    "hit in the host tier": DEEPEST,
}


@pytest.fixture(scope="module")
def references() -> References:
    return References()


def play(references: References, **changes: str) -> tuple[Outcome, Counter[str]]:
    stage = Stage(references, seed=2)
    (outcome,) = stage.play([replace(CELL, **changes)])
    return outcome, stage.happened


@pytest.mark.parametrize("cache", CACHES)
def test_a_plant_makes_the_hit_that_it_promises(cache: str, references: References) -> None:
    outcome, _ = play(references, cache=cache)
    assert not outcome.verdict.differences
    assert outcome.cached_tokens == FOUND[cache]


WITNESS = {
    "neighbour cancelled": "Finished",
    "demoted": "DrafterOff",
    "parked and replayed": "Parked",
    "preempted": "Parked",
}
LEAST = {"Finished": 2, "DrafterOff": 1, "Parked": 1}


@pytest.mark.parametrize("way", WAYS)
def test_a_way_happens_and_changes_nothing(way: str, references: References) -> None:
    outcome, happened = play(references, way=way)
    assert not outcome.verdict.differences
    witness = WITNESS.get(way)
    if witness:
        assert happened[witness] >= LEAST[witness]


def test_a_resumed_cell_compares_what_is_left(references: References) -> None:
    whole, _ = play(references)
    rest, _ = play(references, way="resumed")
    assert rest.verdict.compared["tokens"] < whole.verdict.compared["tokens"]
    assert rest.verdict.compared["kv rows"] == whole.verdict.compared["kv rows"]


def test_a_crash_is_a_difference_of_its_cells_and_the_next_ones_run(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(references, seed=2)

    def broken(self: Engine) -> list[object]:
        raise ZeroDivisionError("by a fault")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", broken)
        (outcome,) = stage.play([CELL])
    (difference,) = outcome.verdict.differences
    assert difference.kind == "engine"
    assert "by a fault" in difference.got
    (outcome,) = stage.play([CELL])
    assert not outcome.verdict.differences


def test_the_gap_is_that_of_the_references_row(references: References) -> None:
    expected = references.of(CELL)
    assert expected.logprobs is not None
    (best, first), (second, other) = expected.logprobs[5].top[:2]
    assert references.gap(CELL, 5, best, second) == pytest.approx(first - other, abs=1e-12)
