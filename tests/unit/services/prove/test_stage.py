"""Every value of the table does what its name says, on an engine that is sound, broken or stuck."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from services.gpu_worker.engine.engine import Engine
from services.prove.axes import AXES, CACHES, WAYS, Cell
from services.prove.reference import References
from services.prove.scene import Scene
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
    "another worker's hit": DEEPEST,
    "exact hit": 192,
}


ASKED = {"exact hit": {"prompt": "on the grid"}}


@pytest.fixture(scope="module")
def references() -> References:
    return References()


def play(references: References, **changes: str) -> tuple[Outcome, Counter[str]]:
    stage = Stage(references, seed=2)
    (outcome,) = stage.play([replace(CELL, **changes)])
    return outcome, stage.happened


@pytest.mark.parametrize("cache", CACHES)
def test_a_plant_makes_the_hit_that_it_promises(cache: str, references: References) -> None:
    outcome, _ = play(references, cache=cache, **ASKED.get(cache, {}))
    assert not outcome.verdict.differences
    assert outcome.cached_tokens == FOUND[cache]


WITNESS = {
    "neighbour cancelled": "Finished",
    "demoted": "DrafterOff",
    "parked and replayed": "Parked",
    "preempted": "Parked, preempted",
    "preempted in prime": "Parked, preempted",
    "preempted in decode": "Parked, preempted",
    "overshot": "Overshot",
    "crowded": "Finished",
}
AGREEING = {"overshot": {"rule": "sampled"}}
"""A drafter must be right about the token after the end."""
LEAST = {"neighbour cancelled": 2, "preempted in prime": 2, "preempted in decode": 3, "crowded": 10}


@pytest.mark.parametrize("way", WAYS)
def test_a_way_happens_and_changes_nothing(way: str, references: References) -> None:
    outcome, happened = play(references, way=way, **AGREEING.get(way, {}))
    assert not outcome.verdict.differences
    witness = WITNESS.get(way)
    if witness:
        assert happened[witness] >= LEAST.get(way, 1)


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


def test_r_s16_a_crowd_takes_the_drafter_away_in_mid_stream(references: References) -> None:
    outcome, happened = play(references, way="crowded", policy="draft if it pays", burst="1 round")
    assert not outcome.verdict.differences
    assert happened["DrafterOff, load"] >= 1
    assert outcome.telemetry.drafted > 0


def test_r_s1_what_overshot_is_compared_up_to_the_public_length(references: References) -> None:
    whole, _ = play(references, **AGREEING["overshot"])
    over, _ = play(references, way="overshot", **AGREEING["overshot"])
    assert over.verdict.compared["kv rows"] == whole.verdict.compared["kv rows"]
    assert over.verdict.compared["recurrent state"] == 0


def test_another_workers_bytes_are_read(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoil what the other engine spilled: its checksum does not fit, so the hit is lost."""
    planted = CACHES["another worker's hit"]

    def spoiled(scene: Scene) -> int:
        found = planted(scene)
        entry = scene.driver.engine.path(scene.key_at(found))[-1].entry
        assert entry is not None
        assert entry.host is not None
        entry.host.values.view(torch.int32)[0] ^= 1
        return found

    monkeypatch.setattr("services.prove.stage.CACHES", {**CACHES, "another worker's hit": spoiled})
    outcome, _ = play(references, cache="another worker's hit")
    assert {difference.kind for difference in outcome.verdict.differences} == {"cached tokens"}
