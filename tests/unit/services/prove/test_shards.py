"""Shards: every cell in one of them, what asks the same together, the same sums however they are run."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from services.prove.axes import AXES, Cell
from services.prove.cover import quick
from services.prove.reference import origin
from services.prove.report import Tally
from services.prove.shards import LEAST_CELLS, Shard, cut, play, run
from shared.errors import BurstlineError, EngineFault

CELL = Cell(
    **(
        {axis: next(iter(values)) for axis, values in AXES.items()}
        | {"drafter": "mtp K=3", "rule": "few ids", "budget": "9 tokens", "cache": "hit at 64"}
    )
)
CELLS = [replace(CELL, rule=rule, way=way) for rule in ("greedy", "few ids") for way in ("whole", "demoted")]


def made(cells: list[Cell], most: int, least: int = LEAST_CELLS) -> list[Shard]:
    return cut(cells, most, everything=False, seed=1, least=least)


def with_few_trials(parts: list[Shard]) -> list[Shard]:
    """One trial of the families each, as if there were many more parts."""
    return [replace(part, of=1000) for part in parts]


def test_every_cell_is_in_one_shard_and_no_reference_in_two() -> None:
    cells = quick(1)
    parts = made(cells, 2)
    assert len(parts) == 2
    assert sorted(map(str, cells)) == sorted(str(cell) for part in parts for cell in part.cells)
    asked = [what for part in parts for what in {origin(cell) for cell in part.cells}]
    assert len(asked) == len(set(asked))
    sizes = [len(part.cells) for part in parts]
    assert max(sizes) < 1.5 * min(sizes)


def test_a_model_with_few_cells_goes_to_few_shards() -> None:
    cells = quick(1)
    few = [cell for cell in cells if cell.model == "pocket"][: LEAST_CELLS - 1]
    parts = made([*(cell for cell in cells if cell.model == "tiny"), *few], 2)
    assert sorted(sum(cell.model == "pocket" for cell in part.cells) for part in parts) == [0, len(few)]


def test_few_cells_are_not_cut() -> None:
    assert [len(part.cells) for part in made(CELLS, 8)] == [len(CELLS)]
    assert len(made(CELLS * LEAST_CELLS, 3)) == 3
    assert [part.cells for part in made([], 8)] == [()]


def test_the_sums_do_not_depend_on_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = with_few_trials(made(CELLS, 2, least=2))
    apart = run(parts)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert run(parts).results() == apart.results()
    assert apart.cells == len(CELLS)
    assert apart.differences == 0


def test_merging_adds_everything() -> None:
    one = play(with_few_trials(made(CELLS, 1))[0])
    both = Tally()
    for _ in range(2):
        both.merge(pickle.loads(pickle.dumps(one)))
    assert (both.cells, both.accepted, both.restored) == (2 * one.cells, 2 * one.accepted, 2 * one.restored)
    assert both.compared.total() == 2 * one.compared.total()
    assert both.results()["cells_by_value"]["way"] == {"whole": 4, "demoted": 4}


@pytest.mark.parametrize("fault", [EngineFault("why"), BurstlineError("why")])
def test_what_a_process_raises_arrives(fault: BurstlineError) -> None:
    assert pickle.loads(pickle.dumps(fault)).message == "why"
