"""Cuts the cells into shards that share nothing, and runs them, in processes of their own where there are several.

Cells that ask the same go into one shard, so that no reference is made twice. What a shard runs is a function of the
seed and of the number of shards, never of how many processors there are.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final

from services.prove.axes import Cell
from services.prove.device import Device, choose, chosen
from services.prove.families import attempt, dealt, trials
from services.prove.reference import Origin, References, origin
from services.prove.report import Tally
from services.prove.stage import Stage, groups

REPORTS: Final = 10
"""Lines of progress a shard."""
LEAST_CELLS: Final = 50
"""Fewer are not worth a process, which loads torch and the models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Number `number` of `of`: its cells, and its part of the families' trials."""

    number: int
    of: int
    cells: tuple[Cell, ...]
    everything: bool
    seed: int


def cut(
    cells: Sequence[Cell], most: int, *, everything: bool, seed: int, least: int = LEAST_CELLS
) -> list[Shard]:
    """Deal what is asked to at most `most` shards of at least `least` cells by turns; a model with few cells goes to few
    of them, since every shard fills the companies of each model that it has."""
    count = max(1, min(most, len(cells) // least))
    hands: dict[Origin, int] = {}
    dealt = 0
    for model, number in sorted(Counter(cell.model for cell in cells).items()):
        few = max(1, min(count, number // least))
        asked = sorted({origin(cell) for cell in cells if cell.model == model})
        hands |= {what: (dealt + turn % few) % count for turn, what in enumerate(asked)}
        dealt += few
    return [
        Shard(
            number=number,
            of=count,
            cells=tuple(cell for cell in cells if hands[origin(cell)] == number),
            everything=everything,
            seed=seed,
        )
        for number in range(count)
    ]


def play(shard: Shard) -> Tally:
    """Run a shard's cells (and those that fill their companies) and its trials; lines of progress go to stderr."""
    tally, stage = Tally(), Stage(References(), shard.seed)
    planned = list(groups(shard.cells, shard.seed))
    total, reported = sum(map(len, planned)), 0
    for group in planned:
        for outcome in stage.play(group):
            tally.add(outcome)
        if tally.cells * REPORTS // total > reported:
            reported = tally.cells * REPORTS // total
            _report(shard, f"{tally.cells} of {total} cells, {tally.differences} differences")
    tally.happened.update(stage.happened)
    mine = dealt(trials(shard.everything, shard.seed), shard.number, shard.of)
    for name, trial in mine:
        tally.add_trial(attempt(name, trial))
    if mine:
        _report(shard, f"{len(mine)} trials, {tally.differences} differences")
    return tally


def run(shards: Iterable[Shard]) -> Tally:
    """Run all shards, as many at once as there are processors, and add up. Raises what the first to fail raised."""
    whole = Tally()
    for tally in _played(list(shards)):
        whole.merge(tally)
    return whole


def _played(shards: Sequence[Shard]) -> Iterator[Tally]:
    workers = min(len(shards), os.cpu_count() or 1)
    if workers == 1:
        yield from map(play, shards)
        return
    # Not forked: torch's threads do not survive that.
    # Engines go by the collector, hundreds of them: it shall not look at all of torch each time.
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(chosen(),)
    ) as pool:
        for done in as_completed([pool.submit(play, shard) for shard in shards]):
            yield done.result()


def _begin(device: Device) -> None:
    """Found by its name, which loads this module and torch with it."""
    choose(device)
    gc.freeze()


def _report(shard: Shard, line: str) -> None:
    sys.stderr.write(f"part {shard.number + 1} of {shard.of}: {line}\n")
