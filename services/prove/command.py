"""`burstline prove`: choose cells, run them, tell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from rich.console import Console

from services.prove.axes import Cell
from services.prove.cover import full, quick
from services.prove.evidence import evidence, write
from services.prove.families import Trial, attempt, trials
from services.prove.reference import References
from services.prove.report import Tally
from services.prove.stage import Stage, groups
from shared.clock import SYSTEM
from shared.errors import BurstlineError

REPORTS: Final = 20
"""Lines of progress."""


def run(
    cells: Iterable[Cell],
    seed: int,
    report: Callable[[str], object] = lambda _: None,
    *,
    families: Iterable[tuple[str, Trial]] = (),
) -> Tally:
    """Run the cells (and those that fill their companies) and trials, and add up; `report` gets a line now and then."""
    tally, stage = Tally(), Stage(References(), seed)
    planned = list(groups(cells, seed))
    total = sum(map(len, planned))
    reported = 0
    for group in planned:
        for outcome in stage.play(group):
            tally.add(outcome)
        if tally.cells * REPORTS // total > reported:
            reported = tally.cells * REPORTS // total
            report(f"{tally.cells} of {total} cells, {tally.differences} differences")
    tally.happened.update(stage.happened)
    for name, trial in families:
        tally.add_trial(attempt(name, trial))
    return tally


def main(*, everything: bool, seed: int, json_file: Path | None) -> int:
    """Returns 0 when every bar holds, 1 when one does not, 2 when it could not measure."""
    console, began = Console(), SYSTEM.monotonic_ns()
    try:
        cells = full(seed) if everything else quick(seed)
        tally = run(cells, seed, _progress, families=trials(everything, seed))
    except (BurstlineError, OSError) as fault:
        sys.stderr.write(f"burstline: prove could not measure: {fault}\n")
        return 2
    seconds = (SYSTEM.monotonic_ns() - began) / 1e9
    console.print(tally.table())
    for difference in tally.told:
        console.print(str(difference), style="red", markup=False, highlight=False)
    bars = tally.bars()
    console.print(
        f"{tally.cells} cells, {tally.trials} trials of families, {tally.compared.total():,} comparisons, {tally.differences} differences, "
        f"{tally.accepted} accepted and {tally.rejected} rejected drafts, {seconds:.0f} s"
    )
    for bar in bars:
        if not bar.holds:
            console.print(f"NOT AS PROMISED: {bar.name} is {bar.value:g} {bar.unit}, limit {bar.limit:g}")
    if json_file is not None:
        name = f"prove --{'full' if everything else 'quick'} --seed {seed}"
        write(json_file, evidence(name, {**tally.results(), "seconds": round(seconds, 1)}, bars))
    return 0 if all(bar.holds for bar in bars) else 1


def _progress(line: str) -> None:
    sys.stderr.write(line + "\n")
