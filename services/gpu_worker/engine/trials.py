"""Launches timed when an engine starts: what a verify, a draft and a block cost here (`gain.Pace`).

On a card these are rounds that run whole, as streams will have them, in wall time. On the CPU they are launches, in the
thread's own processor time, so that a start beside other work misjudges nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from services.gpu_worker.engine.batch import BlockAsk, DraftRows, VerifyRows
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.faults import OutOfMemory
from services.gpu_worker.engine.flights import By, WholeRow
from services.gpu_worker.engine.gain import Gain, Pace
from services.gpu_worker.engine.limits import SpecGate
from services.gpu_worker.engine.requests import SamplingParams
from services.gpu_worker.engine.runner import ModelRunner
from shared.clock import Clock

log = logging.getLogger(__name__)

BATCHES: Final = (1, 4, 16, 64)
"""Streams together for which launches are timed, as far as the engine can have so many."""
REPEATS: Final = 6
"""Launches of a kind, after a first one, of which the fastest counts: other work on a machine only ever adds."""
TOKEN: Final = 3
"""Any id: what is computed does not matter."""
HEAD_DRAFTS: Final = 3
"""Of a round whose drafts the head makes, where rounds run whole."""
MOST_COLUMNS: Final = 8
"""Of a verify that is timed: with its repeats all rows lie in one block."""


def gain_for(
    gate: SpecGate | None,
    runner: ModelRunner,
    config: EngineConfig,
    reset: Callable[[int], None],
    clock: Clock,
) -> Gain:
    """With launches timed if the gate asks for the gain and drafts are possible. See `measured`."""
    if gate is None or gate.least_gain is None or config.max_verify < 2:
        return Gain()
    most = min(config.max_batch, config.num_slots, config.num_blocks)
    batches = {min(batch, most) for batch in BATCHES}
    alone = config.threads == 1 and not runner.runs_whole
    timer = clock.thread_ns if alone else clock.monotonic_ns
    return Gain(measured(runner, batches=batches, columns=config.max_verify, reset=reset, timer=timer))


def measured(
    runner: ModelRunner,
    *,
    batches: Iterable[int],
    columns: int,
    reset: Callable[[int], None],
    timer: Callable[[], int],
) -> list[Pace]:
    """Time launches on slots and blocks that nobody has yet: as many of both as the largest batch, the slots empty.
    `columns` = of the widest verify; `reset` empties a slot again; `timer` tells nanoseconds. Batches that do not fit into
    memory are left out.
    """
    trial = _WholeTrial if runner.runs_whole else _Trial
    paces: list[Pace] = []
    for batch in sorted(set(batches)):
        try:
            paces.append(trial(runner, batch).pace(min(columns, MOST_COLUMNS), timer))
        except OutOfMemory:
            log.info("speculation is not timed for %d streams: that does not fit into memory", batch)
            break
        finally:
            for slot in range(batch):
                reset(slot)
    return paces


class _Trial:
    """`batch` sequences of a block each, whose rows are all accepted, so that a verify folds as many as it brings."""

    def __init__(self, runner: ModelRunner, batch: int) -> None:
        self._runner = runner
        self._slots = range(batch)
        self._rows = 0
        self._hiddens: list[Tensor] = []

    def pace(self, columns: int, timer: Callable[[], int]) -> Pace:
        """Time the kinds by turns."""
        kinds: list[Callable[[], None]] = [lambda: self._verify(1), lambda: self._verify(columns)]
        has_mtp, has_block = self._runner.dims.has_mtp, self._runner.block is not None
        kinds += [self._draft] if has_mtp else []
        kinds += [self._block] if has_block else []
        plain, full, *rest = _fastest(kinds, timer)
        return Pace(
            batch=len(self._slots),
            plain=plain,
            columns=columns,
            full=full,
            draft=rest[0] if has_mtp else 0.0,
            block=rest[-1] if has_block else 0.0,
        )

    def _verify(self, width: int) -> None:
        ids = (TOKEN,) * width
        tap = self._runner.block is not None
        rows = [
            VerifyRows(slot=i, start=self._rows, tokens=ids, block_table=(i,), tap=tap) for i in self._slots
        ]
        self._hiddens = self._runner.verify(rows)
        self._runner.logits(torch.cat(self._hiddens)).cpu()
        for slot in self._slots:
            self._runner.accept(slot, width)
        self._rows += width

    def _block(self) -> None:
        """The rows of the last verifies are taken in as well, as in a round."""
        asks = [BlockAsk(slot=i, start=self._rows, anchor=TOKEN, k=MOST_COLUMNS - 1) for i in self._slots]
        self._runner.propose(asks)

    def _draft(self) -> None:
        rows = [
            DraftRows(start=0, tokens=[TOKEN], hiddens=hidden[:1], block_table=(slot,))
            for slot, hidden in zip(self._slots, self._hiddens, strict=True)
        ]
        self._runner.logits(torch.cat(self._runner.draft(rows))).cpu()


class _WholeTrial:
    """The same of rounds that a card runs whole, each with one row accepted: what a draft or a block costs is what its
    round takes over a verify of as many columns."""

    def __init__(self, runner: ModelRunner, batch: int) -> None:
        self._runner = runner
        self._slots = range(batch)
        self._rows = 0

    def pace(self, columns: int, timer: Callable[[], int]) -> Pace:
        """Time the kinds by turns."""
        k, heads = columns - 1, min(HEAD_DRAFTS, columns - 1)
        kinds: list[Callable[[], None]] = [self._round, partial(self._round, given=(TOKEN,) * k)]
        has_mtp, has_block = self._runner.dims.has_mtp, self._runner.block is not None
        kinds += [partial(self._round, k=heads, by=By.HEAD)] if has_mtp else []
        kinds += [partial(self._round, k=k, by=By.BLOCK)] if has_block else []
        plain, full, *rest = _fastest(kinds, timer)
        verify = plain + heads / k * (full - plain)
        return Pace(
            batch=len(self._slots),
            plain=plain,
            columns=columns,
            full=full,
            draft=max(0.0, rest[0] - verify) / heads if has_mtp else 0.0,
            block=max(0.0, rest[-1] - full) if has_block else 0.0,
        )

    def _round(self, given: Sequence[int] = (), k: int = 0, by: By = By.HOST) -> None:
        nothing = torch.zeros(1, self._runner.dims.hidden)
        rows = [
            WholeRow(
                slot=slot,
                start=self._rows,
                anchor=TOKEN,
                block_table=(slot,),
                rules=SamplingParams(seed=0, temperature=0.0),
                choice=0,
                given=given,
                k=k,
                by=by,
                catch_up=DraftRows(start=self._rows, tokens=[TOKEN], hiddens=nothing, block_table=(slot,))
                if by is By.HEAD
                else None,
                tap=self._runner.block is not None,
            )
            for slot in self._slots
        ]
        self._runner.whole(rows)
        for slot in self._slots:
            self._runner.accept(slot, 1)
        self._rows += 1


def _fastest(kinds: Sequence[Callable[[], None]], timer: Callable[[], int]) -> list[float]:
    """Seconds of each, by turns, so that a machine that is slow for a while is slow for all of them."""
    best = [math.inf] * len(kinds)
    for repeat in range(REPEATS + 1):
        for number, launch in enumerate(kinds):
            began = timer()
            launch()
            took = max(timer() - began, 1) / 1e9
            best[number] = min(best[number], took) if repeat else math.inf
    return best
