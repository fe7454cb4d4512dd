"""`burstline prove` can fail: every fault that is put into the engine is found by a covering set of cells."""

from __future__ import annotations

from collections import Counter

import pytest

from services.prove.axes import Cell
from services.prove.cover import once, pairwise
from services.prove.reference import References
from services.prove.stage import Stage, groups
from tests.property.prove.faults import DRAFT_PAIRING, FAULTS

SEED = 3
FIXED = {
    "model": "tiny",
    "prompt": "tool call",
    "chunk": "chunk 128",
    "burst": "2 rounds",
    "policy": "always draft",
}
"""A smaller matrix than --quick, by the same means: faults do not need every prompt."""

THIN = 3
"""Where nothing ends the search early, every third group must do."""


@pytest.fixture(scope="module")
def planned() -> list[list[Cell]]:
    return list(groups(pairwise(FIXED, SEED), SEED))


@pytest.fixture(scope="module")
def references(planned: list[list[Cell]]) -> References:
    """All streams that are expected, made before any fault."""
    made = References()
    _expect(planned, made)
    return made


def _expect(planned: list[list[Cell]], references: References) -> None:
    for group in planned:
        for cell in group:
            references.of(cell)


def found(planned: list[list[Cell]], references: References, *, enough: frozenset[str]) -> Counter[str]:
    """Kinds of difference, up to the group that shows one of `enough`."""
    kinds: Counter[str] = Counter()
    stage = Stage(references, SEED)
    for group in planned:
        for outcome in stage.play(group):
            kinds.update(difference.kind for difference in outcome.verdict.differences)
        if enough & kinds.keys():
            break
    return kinds


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_engine_is_found(
    name: str, planned: list[list[Cell]], references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    if fault.fixed:
        planned = list(groups(once({**FIXED, **fault.fixed}, SEED), SEED))
        _expect(planned, references)
    planned = sorted(planned, key=lambda group: -sum(cell.rule in fault.rules for cell in group) / len(group))
    fault.install(monkeypatch)
    assert fault.shows & found(planned, references, enough=fault.shows).keys()


def test_a_wrong_draft_pairing_costs_acceptance_and_never_a_token(
    planned: list[list[Cell]], references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    DRAFT_PAIRING(monkeypatch)
    assert set(found(planned[::THIN], references, enough=frozenset())) == {"draft plane"}


def test_a_sound_engine_shows_no_difference(planned: list[list[Cell]], references: References) -> None:
    assert not found(planned[::THIN], references, enough=frozenset())
