"""The whole model's rows in any company: hidden states, logits, KV rows and recurrent states, below the engine (C1.1).

A trial is one model. One sequence is primed and goes on alone, a column at a time: that is the reference. Then it is primed in
other cuts and goes on again in verifies of other widths, beside up to 63 sequences whose lengths, columns and accepted rows are
drawn. Every part of it must have the same bits. Lengths lie around the edges of chunks, splits and pages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from services.gpu_worker.engine.batch import PrefillChunk, VerifyRows
from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig
from services.gpu_worker.engine.ground import Ground, lay_out
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.loader import LoadedModel
from services.prove.compare import Difference, Verdict
from services.prove.driver import same_bits
from services.prove.models import EVERY
from services.prove.trial import Trial

SAID: Final = 16
"""Rows after the prompt."""
CHUNK: Final = 512
TABLE: Final = 6
"""Blocks of a sequence."""
MOST_ROWS: Final = 512
"""Of one verify, padding apart."""
QUICK: Final = ("tiny", "window")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a trial goes through: prompt lengths, sequences a call, columns a sequence. Lengths ascend, so that rows which
    nothing writes after the prompt (the draft plane's) are what they were when they were allocated."""

    lengths: tuple[int, ...]
    sequences: tuple[int, ...]
    columns: tuple[int, ...]


SOME: Final = Sizes(lengths=(65, 256), sequences=(1, 5, 17), columns=(3, 8))
ALL: Final = Sizes(
    lengths=(63, 64, 65, 127, 255, 256, 257),
    sequences=(1, 2, 3, 8, 17, 33, 64),
    columns=(1, 3, 8, 16),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What a sequence left: hidden rows and logits of the prompt's end and of what followed, all KV rows, and the state."""

    primed: Tensor
    hidden: Tensor
    logits: Tensor
    kv: Tensor
    state: bytes


def family(everything: bool, seed: int) -> list[Trial]:
    """See `families.Family`."""
    names, sizes = (EVERY, ALL) if everything else (QUICK, SOME)
    return [Trial(name=name, run=partial(_tried, name, sizes, seed)) for name in names]


def _tried(name: str, sizes: Sizes, seed: int) -> Verdict:
    """One of `EVERY`, loaded where it is tried."""
    return tried(EVERY[name](), name, sizes, seed)


def tried(loaded: LoadedModel, name: str, sizes: Sizes, seed: int) -> Verdict:
    """Every length in turn, with each number of sequences and each width once."""
    verdict, draw = Verdict(), random.Random(seed)
    hall = Hall(loaded, max(sizes.sequences), max(sizes.columns), draw)
    shapes = [
        (count, width) for count in sizes.sequences for width in sizes.columns if count * width <= MOST_ROWS
    ]
    for place, length in enumerate(sizes.lengths):
        ids = hall.ids(length + SAID)
        expected = hall.alone(ids)
        for count, width in shapes[place :: len(sizes.lengths)]:
            got = hall.together(ids, count, width)
            _compare(f"{name}, {length} rows, {count} x {width}", length, expected, got, verdict)
    return verdict


@dataclass
class Hall:
    """Pools for the sequence that is looked at (slot 0) and for its company."""

    loaded: LoadedModel
    most: int
    widest: int
    draw: random.Random
    ground: Ground = field(init=False)
    company: list[Guest] = field(init=False)

    def __post_init__(self) -> None:
        config = EngineConfig(
            num_blocks=self.most * TABLE,
            num_slots=self.most,
            num_snapshots=1,
            max_verify=self.widest,
            max_batch=self.most,
            prefill_chunk=CHUNK,
            max_context=TABLE * BLOCK_ROWS,
        )
        self.ground = lay_out(self.loaded, config, EngineLimits())
        blocks = list(range(self.most * TABLE))
        self.draw.shuffle(blocks)
        self.company = [
            Guest(self, slot, blocks[slot * TABLE : (slot + 1) * TABLE]) for slot in range(self.most)
        ]

    def ids(self, count: int) -> list[int]:
        """Random ids."""
        return [self.draw.randrange(self.ground.dims.vocab) for _ in range(count)]

    @torch.no_grad()
    def alone(self, ids: Sequence[int]) -> Rows:
        """Chunk by chunk of the grid, then column by column."""
        guest = self.company[0]
        guest.enter(ids[:-SAID], [BLOCK_ROWS])
        hidden = [self._verify([guest.ask([token])])[0] for token in guest.going_on(ids[-SAID:], 1)]
        return guest.left(hidden)

    @torch.no_grad()
    def together(self, ids: Sequence[int], count: int, width: int) -> Rows:
        """In chunks of any size, then `width` columns at a time, in calls of `count` sequences."""
        guest, others = self.company[0], self.company[1:count]
        guest.enter(ids[:-SAID], [self.draw.randrange(1, 5) * BLOCK_ROWS for _ in range(5)])
        hidden = []
        for first in range(0, SAID, width):
            part = list(ids[len(ids) - SAID + first :][:width])
            rows = [other.drawn(width) for other in others]
            at = self.draw.randrange(count)
            hidden.append(self._verify([*rows[:at], guest.ask(part), *rows[at:]])[at])
            guest.accept(len(part))
            for other, asked in zip(others, rows, strict=True):
                other.accept(self.draw.randint(0, len(asked.tokens)))
        return guest.left(hidden)

    def _verify(self, rows: Sequence[VerifyRows]) -> list[Tensor]:
        return [hidden.clone() for hidden in self.ground.runner.verify(rows)]


@dataclass
class Guest:
    """One sequence: its slot, its blocks, how far it is."""

    hall: Hall
    slot: int
    table: list[int]
    length: int = -1
    primed: list[Tensor] = field(default_factory=list)

    def enter(self, ids: Sequence[int], cuts: Sequence[int]) -> None:
        """Prime `ids` from nothing, in chunks of these sizes, the last of which repeats."""
        runner, self.length, self.primed = self.hall.ground.runner, 0, []
        self.hall.ground.slots.reset(self.slot)
        previous = torch.zeros(self.hall.ground.dims.hidden)
        sizes = iter([*cuts, *[cuts[-1]] * len(ids)])
        while self.length < len(ids):
            tokens = list(ids[self.length : self.length + next(sizes)])
            chunk = PrefillChunk(
                slot=self.slot,
                start=self.length,
                tokens=tokens,
                block_table=self.table,
                previous_hidden=previous,
            )
            self.primed.append(runner.prefill([chunk])[0].clone())
            previous = self.primed[-1][-1]
            self.length += len(tokens)

    def going_on(self, ids: Sequence[int], width: int) -> Iterator[int]:
        """Every id, each accepted after it was asked."""
        for token in ids:
            yield token
            self.accept(width)

    def ask(self, tokens: Sequence[int]) -> VerifyRows:
        return VerifyRows(slot=self.slot, start=self.length, tokens=tokens, block_table=self.table)

    def drawn(self, width: int) -> VerifyRows:
        """A verify of up to `width` columns, from a new and short prompt where there is no room for more."""
        draw = self.hall.draw
        if self.length < 0 or self.length + width > TABLE * BLOCK_ROWS:
            self.enter(self.hall.ids(draw.randint(1, 2 * BLOCK_ROWS)), [CHUNK])
        return self.ask(self.hall.ids(draw.randint(1, width)))

    def accept(self, rows: int) -> None:
        self.hall.ground.runner.accept(self.slot, rows)
        self.length += rows

    def left(self, hidden: Sequence[Tensor]) -> Rows:
        """Everything that it leaves behind, settled."""
        ground, rows = self.hall.ground, torch.cat(list(hidden))
        ground.runner.flush(self.slot)
        primed = torch.cat(self.primed)
        return Rows(
            primed=primed,
            hidden=rows,
            logits=ground.runner.logits(torch.cat((primed[-1:], rows))).cpu(),
            kv=ground.kv.read_rows(self.table, 0, self.length),
            state=ground.states.digest(self.slot),
        )


def _compare(name: str, prompt: int, expected: Rows, got: Rows, verdict: Verdict) -> None:
    """Rows of the prompt, rows after it, logits, KV rows, states."""
    planes = [
        ("hidden rows of the prompt", expected.primed, got.primed, 0),
        ("hidden rows", expected.hidden, got.hidden, prompt),
        ("logits", expected.logits, got.logits, prompt - 1),
        ("kv rows", expected.kv.movedim(3, 0), got.kv.movedim(3, 0), 0),
    ]
    for kind, want, have, first in planes:
        verdict.compared[kind] += len(want)
        if not same_bits(want.contiguous(), have.contiguous()):
            _differs(name, kind, first + _first_row(want, have), verdict)
    verdict.compared["recurrent state"] += 1
    if expected.state != got.state:
        _differs(name, "recurrent state", prompt + SAID, verdict)


def _first_row(want: Tensor, have: Tensor) -> int:
    rows = min(len(want), len(have))
    return next(
        (row for row in range(rows) if not same_bits(want[row].contiguous(), have[row].contiguous())), rows
    )


def _differs(name: str, kind: str, position: int, verdict: Verdict) -> None:
    verdict.differences.append(
        Difference(
            cell=name,
            request_id=name,
            kind=kind,
            position=position,
            expected="the bits that it has alone",
            got="others",
        )
    )
