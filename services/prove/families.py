"""Claims that are no value of an axis: a family makes its own trials, and its own way to tell what is right.

A trial is run once, judged by its family (`compare.judge` against a record, or a `Verdict` of its own making), and counted
beside the cells. Trials must not depend on one another: they run in any order and in several processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.prove import drafts, grammars, public, rows, turns
from services.prove.compare import Verdict, crashed
from services.prove.trial import Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOutcome:
    """One trial that was run."""

    family: str
    verdict: Verdict


Family = Callable[[bool, int], Sequence[Trial]]
"""(whole run, seed) -> its trials; few and cheap ones for `--quick`. The same arguments give the same trials."""

FAMILIES: Final[Mapping[str, Family]] = {
    "turns that go on from what was decoded": turns.family,
    "every drafter on every family of models": drafts.family,
    "streams that follow a grammar": grammars.family,
    "rows of the whole model in any company": rows.family,
    "a public model with n-gram drafts": public.family,
}
"""By the name that the table and the evidence tell."""


def trials(everything: bool, seed: int) -> list[tuple[str, Trial]]:
    """Those of all families, each with the family's name."""
    return [(name, trial) for name, family in FAMILIES.items() for trial in family(everything, seed)]


def dealt(asked: Sequence[tuple[str, Trial]], number: int, of: int) -> list[tuple[str, Trial]]:
    """Those of part `number` of `of`: what shares references stays together, the largest group goes first, and each to
    the part that has the fewest trials."""
    group = [(family, trial.shares or trial.name) for family, trial in asked]
    loads, hands = [0] * of, {}
    for what, size in Counter(group).most_common():
        hands[what] = loads.index(min(loads))
        loads[hands[what]] += size
    return [one for one, what in zip(asked, group, strict=True) if hands[what] == number]


def attempt(family: str, trial: Trial) -> TrialOutcome:
    """Run a trial; one that breaks is a difference, and the others still count."""
    try:
        verdict = trial.run()
    except Exception as fault:  # noqa: BLE001 - a crash is a finding
        verdict = crashed(f"{family}: {trial.name}", fault)
    return TrialOutcome(family=family, verdict=verdict)
