"""Which cells to run: a set that covers every value or pair of values, or the whole product of what the engine does.

Everything is a function of a seed. Impossible combinations (`meaningful`) are never chosen.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from services.prove.axes import AXES, Cell, meaningful

CANDIDATES: Final = 12
"""Random completions tried for each new cell of a covering set; the one that covers most is taken."""

TINY: Final = "tiny"
"""The cheapest model bears the largest sets."""
LONGEST: Final = "longest"
"""A prompt whose prime costs as much as those of all others together."""

VARIED: Final = ("drafter", "burst", "cache", "way")
"""Axes whose whole product `every` runs, alone or in company by turns."""

Pair = frozenset[tuple[str, str]]
Fits = Callable[[Mapping[str, str]], bool]
"""Whether a (partial) choice may be run."""


def quick(seed: int) -> list[Cell]:
    """Every pair of values on the tiny model, every value once on every other."""
    cells = pairwise({"model": TINY}, seed, _few_companies)
    for model in _others():
        cells += once({"model": model}, seed, _few_companies)
    return cells


def full(seed: int) -> list[Cell]:
    """The whole product on the tiny model, with the longest prompt every pair of values; and every pair on every other
    model."""
    cells = list(every({"model": TINY}, seed, dear=LONGEST))
    cells += pairwise({"model": TINY, "prompt": LONGEST}, seed, _few_companies)
    for model in _others():
        cells += pairwise({"model": model}, seed, _few_companies)
    return cells


def pairwise(fixed: Mapping[str, str], seed: int, fits: Fits = meaningful) -> list[Cell]:
    """Cells in which every possible pair of values meets at least once; `fixed` values are the same in all of them."""
    draw = random.Random(seed)
    domains = _domains(fixed)
    left = set(_pairs(domains, fits))
    cells = []
    while left:
        # Sorted, because a set's order is not the same in two processes.
        start = min(left, key=lambda pair: sorted(pair))
        tries = [_completed(dict(start), domains, draw, fits) for _ in range(CANDIDATES)]
        best = max(tries, key=lambda choice: len(left & _within(choice)))
        left -= _within(best)
        cells.append(Cell(**best))
    return cells


def once(fixed: Mapping[str, str], seed: int, fits: Fits = meaningful) -> list[Cell]:
    """Cells in which every value occurs."""
    draw = random.Random(seed)
    domains = _domains(fixed)
    left = [(name, value) for name, values in domains.items() for value in values]
    cells: list[Cell] = []
    while left:
        name, value = left[0]
        choice = _completed({name: value}, domains, draw, fits)
        left = [(name, value) for name, value in left if choice[name] != value]
        cells.append(Cell(**choice))
    return cells


def every(fixed: Mapping[str, str], seed: int, *, dear: str = "") -> Iterator[Cell]:
    """The whole product of `VARIED`; the other axes take random values, but the prompt is never the `dear` one."""
    draw = random.Random(seed)
    domains = _domains(fixed)
    domains["prompt"] = [name for name in domains["prompt"] if name != dear]
    for values in itertools.product(*(domains[name] for name in VARIED)):
        choice = dict(zip(VARIED, values, strict=True))
        if meaningful(choice):
            yield Cell(**_completed(choice, domains, draw, _some_companies))


def drawn(fixed: Mapping[str, str], draw: random.Random) -> Cell:
    """One random cell with the `fixed` values."""
    return Cell(**_completed(dict(fixed), _domains(fixed), draw, meaningful))


def _others() -> list[str]:
    return [model for model in AXES["model"] if model != TINY]


def _domains(fixed: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """Values of every axis that go with the `fixed` ones."""
    return {
        name: [value for value in values if meaningful({**fixed, name: value})]
        if name not in fixed
        else [fixed[name]]
        for name, values in AXES.items()
    }


def _few_companies(choice: Mapping[str, str]) -> bool:
    """Sixteen cells cost as much as their setting, so few settings are run in company: the diagonal of chunk and burst,
    with one policy and then the other."""
    return _on_diagonal(choice, ("chunk", "burst", "policy"))


def _some_companies(choice: Mapping[str, str]) -> bool:
    """The diagonal of chunk and burst, with every policy."""
    return _on_diagonal(choice, ("chunk", "burst"))


def _on_diagonal(choice: Mapping[str, str], axes: Sequence[str]) -> bool:
    """Whether a cell is alone, or its place on each of the axes is the same (around again on the shorter ones)."""
    if choice.get("company", "alone") == "alone":
        return meaningful(choice)
    places = {axis: list(AXES[axis]).index(choice[axis]) for axis in axes if axis in choice}
    fitting = [
        all(place == step % len(AXES[axis]) for axis, place in places.items())
        for step in range(max(len(AXES[axis]) for axis in axes))
    ]
    return any(fitting) and meaningful(choice)


def _pairs(domains: Mapping[str, Sequence[str]], fits: Fits) -> Iterator[Pair]:
    alone = {name: values[0] for name, values in domains.items() if len(values) == 1}
    for (one, ones), (other, others) in itertools.combinations(domains.items(), 2):
        for a, b in itertools.product(ones, others):
            if fits({**alone, one: a, other: b}):
                yield frozenset({(one, a), (other, b)})


def _within(choice: Mapping[str, str]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(choice.items(), 2)}


def _completed(
    choice: dict[str, str], domains: Mapping[str, Sequence[str]], draw: random.Random, fits: Fits
) -> dict[str, str]:
    """Fill the open axes at random, in random order, with values that go with what is chosen.

    Every value must go with some value of each other axis, whatever else is chosen."""
    names = [name for name in domains if name not in choice]
    draw.shuffle(names)
    for name in names:
        fitting = [value for value in domains[name] if fits({**choice, name: value})]
        choice[name] = draw.choice(fitting)
    return choice
