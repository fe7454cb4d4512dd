"""Adds up what the cells gave; the table, the differences and the evidence object of `burstline prove`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields
from typing import Any, Final

from rich.table import Table

from services.prove.axes import AXES, Cell
from services.prove.compare import Difference, Verdict
from services.prove.families import FAMILIES, TrialOutcome
from services.prove.stage import Outcome
from shared.evidence import Bar

MOST_TOLD: Final = 40
"""Differences that are kept word for word; all are counted."""

FAMILY: Final = "family"
"""Stands in the table where an axis does."""

WITNESSES: Final = (
    (("policy", "draft if it pays"), "DrafterOff", "drafters turned off", "streams"),
    (("policy", "draft if it pays"), "Draft gate moved", "cells whose draft gate moved", "cells"),
    (("way", "crowded"), "DrafterOff, load", "drafters turned off by the load", "streams"),
    (("way", "parked and replayed"), "Parked", "streams set aside and replayed", "streams"),
    (("way", "preempted"), "Parked, preempted", "streams that gave way", "streams"),
    (("way", "overshot"), "Overshot", "streams that were made to overshoot", "streams"),
    (("company", "16 together"), "Mixed company", "greedy and sampled streams together", "companies"),
)
"""(value of an axis, what must happen where cells have it, how the bar calls that, its unit)."""


class Tally:
    """Counts by value of every axis. Bounded: outcomes themselves are not kept."""

    def __init__(self) -> None:
        self.cells = self.trials = 0
        self.compared: Counter[str] = Counter()
        self.difference_kinds: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self.told: list[Difference] = []
        self.accepted = self.rejected = self.restored = 0
        self._cells_by: Counter[tuple[str, str]] = Counter()
        self._compared_by: Counter[tuple[str, str]] = Counter()
        self._differences_by: Counter[tuple[str, str]] = Counter()

    def add(self, outcome: Outcome) -> None:
        """Count one cell."""
        verdict, telemetry = outcome.verdict, outcome.telemetry
        self.cells += 1
        self._judged(verdict)
        self.accepted += telemetry.accepted
        self.rejected += telemetry.drafted - telemetry.accepted
        self.restored += outcome.cached_tokens > 0
        self.happened["Draft gate moved"] += _moved(outcome)
        for value in _values(outcome.cell):
            self._by(value, verdict)

    def add_trial(self, outcome: TrialOutcome) -> None:
        """Count one trial of a family."""
        self.trials += 1
        self._judged(outcome.verdict)
        self._by((FAMILY, outcome.family), outcome.verdict)

    def merge(self, other: Tally) -> None:
        """Add what another part of the same run counted."""
        self.cells += other.cells
        self.trials += other.trials
        self.accepted += other.accepted
        self.rejected += other.rejected
        self.restored += other.restored
        self.told.extend(other.told[: MOST_TOLD - len(self.told)])
        self.compared += other.compared
        self.difference_kinds += other.difference_kinds
        self.happened += other.happened
        self._cells_by += other._cells_by
        self._compared_by += other._compared_by
        self._differences_by += other._differences_by

    def _judged(self, verdict: Verdict) -> None:
        self.compared.update(verdict.compared)
        self.difference_kinds.update(difference.kind for difference in verdict.differences)
        self.told.extend(verdict.differences[: MOST_TOLD - len(self.told)])

    def _by(self, value: tuple[str, str], verdict: Verdict) -> None:
        self._cells_by[value] += 1
        self._compared_by[value] += verdict.compared.total()
        self._differences_by[value] += len(verdict.differences)

    @property
    def differences(self) -> int:
        """All of them."""
        return self.difference_kinds.total()

    def table(self) -> Table:
        """One row a value of every axis that occurred."""
        table = Table(title="One request, one stream", title_justify="left")
        for name in ("axis", "value"):
            table.add_column(name)
        for name in ("cells", "comparisons", "differences"):
            table.add_column(name, justify="right")
        for axis, values in (*AXES.items(), (FAMILY, FAMILIES)):
            occurred = [value for value in values if self._cells_by[axis, value]]
            for number, value in enumerate(occurred):
                key = (axis, value)
                bad = self._differences_by[key]
                table.add_row(
                    axis if number == 0 else "",
                    value,
                    str(self._cells_by[key]),
                    f"{self._compared_by[key]:,}",
                    f"[red]{bad}[/red]" if bad else "0",
                    end_section=number == len(occurred) - 1,
                )
        table.add_row(
            "all",
            "",
            str(self.cells + self.trials),
            f"{self.compared.total():,}",
            str(self.differences),
            style="bold",
        )
        return table

    def results(self) -> dict[str, Any]:
        """Named figures; counts unless a name says otherwise."""
        return {
            "cells": self.cells,
            "trials_by_family": {family: self._cells_by[FAMILY, family] for family in FAMILIES},
            "comparisons": dict(sorted(self.compared.items())),
            "differences": dict(sorted(self.difference_kinds.items())),
            "accepted_drafts": self.accepted,
            "rejected_drafts": self.rejected,
            "cells_restored_from_cache": self.restored,
            "events": dict(sorted(self.happened.items())),
            "cells_by_value": {
                axis: {value: self._cells_by[axis, value] for value in values if self._cells_by[axis, value]}
                for axis, values in AXES.items()
            },
            "told": [_told(difference) for difference in self.told],
        }

    def bars(self) -> list[Bar]:
        """No difference; and the run did meet what it claims to have tried."""
        return [
            Bar.at_most("differences", self.differences, 0, "differences"),
            Bar.at_least("accepted drafts", self.accepted, 1, "tokens"),
            Bar.at_least("rejected drafts", self.rejected, 1, "tokens"),
            Bar.at_least("cells restored from the cache", self.restored, 1, "cells"),
            *self._witnesses(),
        ]

    def _witnesses(self) -> list[Bar]:
        """That what the run's cells set up did come about."""
        return [
            Bar.at_least(name, self.happened[event], 1, unit)
            for value, event, name, unit in WITNESSES
            if self._cells_by[value]
        ]


def _moved(outcome: Outcome) -> bool:
    """Whether later drafts of a round were left out in more rounds than the end of a stream explains, where k shrinks
    as well."""
    drafted = outcome.telemetry.drafted_at
    return bool(drafted) and drafted[0] - drafted[-1] > len(drafted)


def _values(cell: Cell) -> list[tuple[str, str]]:
    return [(field.name, getattr(cell, field.name)) for field in fields(cell)]


def _told(difference: Difference) -> dict[str, Any]:
    cell = difference.cell
    return {**asdict(difference), "cell": asdict(cell) if isinstance(cell, Cell) else cell}
