"""Covering sets: every pair that can be run, the same for the same seed, nothing that cannot be run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict

import pytest

from services.prove import axes
from services.prove.axes import AXES, COMPANIES, Cell, meaningful
from services.prove.cover import LONGEST, VARIED, every, full, once, pairwise, quick
from services.prove.stage import groups, setting

TINY = {"model": "tiny"}


def pairs(cells: list[Cell]) -> set[tuple[tuple[str, str], ...]]:
    return {pair for cell in cells for pair in itertools.combinations(asdict(cell).items(), 2)}


def test_every_pair_that_can_be_run_occurs() -> None:
    found = pairs(pairwise(TINY, seed=1))
    for (one, ones), (other, others) in itertools.combinations(AXES.items(), 2):
        for a, b in itertools.product(ones, others):
            choice = TINY | {one: a, other: b}
            if choice["model"] == "tiny" and meaningful(choice):
                assert ((one, a), (other, b)) in found


def test_quick_holds_every_value() -> None:
    cells = quick(1)
    for axis, values in AXES.items():
        asked = set()
        for model in ("tiny", "pocket", "with a block drafter"):
            found = {getattr(cell, axis) for cell in cells if cell.model == model}
            possible = {value for value in values if meaningful({"model": model, axis: value})}
            assert found == ({model} if axis == "model" else possible)
            asked |= found
        assert axis == "model" or asked == set(values)


def test_full_holds_every_combination_of_what_the_engine_does() -> None:
    cells = list(every(TINY, seed=1))
    found = {tuple(getattr(cell, name) for name in VARIED) for cell in cells}
    wanted = {
        values
        for values in itertools.product(*(AXES[name] for name in VARIED))
        if meaningful(TINY | dict(zip(VARIED, values, strict=True)))
    }
    assert found == wanted
    assert len(full(1)) > len(cells)


def test_full_meets_the_longest_prompt_with_every_value() -> None:
    longest = [cell for cell in full(1) if (cell.model, cell.prompt) == ("tiny", LONGEST)]
    for axis in ("drafter", "burst", "cache", "way", "chunk", "rule"):
        allowed = {value for value in AXES[axis] if meaningful({**TINY, axis: value, "prompt": LONGEST})}
        assert {getattr(cell, axis) for cell in longest} == allowed
    assert len(longest) < len(full(1)) / 10


@pytest.mark.parametrize("make", [quick, full])
def test_cells_are_a_function_of_the_seed_and_can_be_run(make: Callable[[int], list[Cell]]) -> None:
    cells = make(5)
    assert cells == make(5)
    assert all(meaningful(asdict(cell)) for cell in cells)


def test_other_seeds_give_other_cells() -> None:
    assert pairwise(TINY, seed=1) != pairwise(TINY, seed=2)


def test_once_needs_few_cells() -> None:
    assert len(once(TINY, seed=1)) < len(pairwise(TINY, seed=1)) / 2


def test_companies_are_full_and_of_one_setting() -> None:
    cells = pairwise(TINY, seed=1)
    made = list(groups(cells, seed=1))
    for group in made:
        assert len(group) == COMPANIES[group[0].company]
        assert len({setting(cell) for cell in group}) == 1
    assert set(cells) <= set(itertools.chain.from_iterable(made))


def test_a_value_is_never_combined_with_what_it_cannot_be_run_with(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {("cache", "deepest hit"): {"prompt": frozenset({"on the grid"}), "model": frozenset({"pocket"})}}
    monkeypatch.setattr(axes, "NEEDS", needs)
    assert all(cell.cache != "deepest hit" for cell in pairwise(TINY, seed=1))
    hits = [cell for cell in once({"model": "pocket"}, seed=1) if cell.cache == "deepest hit"]
    assert hits
    assert all(cell.prompt == "on the grid" for cell in hits)
