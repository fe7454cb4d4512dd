"""What a round on a card is asked for and answers, and what is known of one that is on its way. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.advance import STOPS
from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.drafters.ladder import LEAST_COLUMNS
from services.gpu_worker.engine.graphs import bucket
from services.gpu_worker.engine.requests import SamplingParams


class By(IntEnum):
    """Who makes a sequence's drafts, as the card is told."""

    HOST = 0
    HEAD = 1
    BLOCK = 2


class Round(NamedTuple):
    """What a launch holds, padding included: a graph each."""

    sequences: int
    columns: int
    head: int = 0
    """Drafts that the head makes; 0 = it is not asked."""
    block: bool = False
    """Whether the block drafter makes any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRow:
    """One sequence of a round. Its columns are the anchor and either `given` drafts or `k` that are made on the card."""

    slot: int
    start: int
    anchor: int
    block_table: Sequence[int]
    rules: SamplingParams
    choice: int
    given: Sequence[int] = ()
    k: int = 0
    by: By = By.HOST
    """With k: who makes them."""
    catch_up: DraftRows | None = None
    """Of the head's: rows of the draft plane up to the anchor's, which it reads first."""
    rungs: int = 0
    """Of the block drafter's: the widest columns of a ladder (`drafters.ladder`); 0 = k holds until the host says else."""
    tap: bool = False
    """A block drafter shall take in the rows that are accepted."""
    left: int = 0
    """Rows that the stream may still commit, this round's among them; 0 = its next round is not known in advance."""
    stops: frozenset[int] = frozenset()
    eager: bool = False

    @property
    def columns(self) -> int:
        return 1 + (self.k or len(self.given))

    @property
    def tokens(self) -> Sequence[int]:
        """Of its columns, as far as they are known: drafts that the card makes are id 0 here."""
        return (self.anchor, *self.given, *(0,) * self.k)


class WholeResult(NamedTuple):
    """What a round decided: the drafts that were verified, the pick of every column (-1 = a broken row), hidden
    [columns, H], and taps [columns, taps * H] if there is a block drafter."""

    drafts: list[int]
    picks: list[int]
    hidden: Tensor
    taps: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a sequence stands in a round that was launched."""

    slot: int
    start: int
    anchor: int
    columns: int
    k: int
    left: int
    caught_up: tuple[int, ...]
    """Tokens that the head reads first, if it drafts."""
    by: By = By.HOST
    rungs: int = 0

    def holds(self, row: WholeRow) -> bool:
        """Whether this is the round that the row asks for."""
        if row.given or (row.slot, row.start, row.anchor, row.columns, row.k) != (
            self.slot,
            self.start,
            self.anchor,
            self.columns,
            self.k,
        ):
            return False
        if not self.k:
            return True
        tokens = tuple(row.catch_up.tokens) if row.catch_up is not None else ()
        read = self.caught_up if self.by is By.HEAD else ()
        return (row.by, row.rungs, tokens) == (self.by, self.rungs, read)

    @property
    def furthest(self) -> int:
        """Where its rows end after this round and the next one, whatever is accepted."""
        most = max(self.k + 2, LEAST_COLUMNS) if self.rungs else self.k + 1
        return self.start + min(self.k + 1 + most, self.left)


@dataclass(frozen=True, slots=True)
class Flight:
    """A round on its way."""

    size: Round
    seats: list[Seat]
    told: Tensor
    hidden: Tensor
    taps: Tensor | None
    done: torch.cuda.Event | None

    @property
    def slots(self) -> frozenset[int]:
        """Of the sequences that go on in it; for those that ended it writes nothing."""
        return frozenset(seat.slot for seat in self.seats if seat.columns)


class Read(NamedTuple):
    """A sequence's line of what a round told (`DeviceRounds.launch`)."""

    picks: list[int]
    drafts: list[int]
    committed: int

    @classmethod
    def of(cls, told: list[int], size: Round, asked: int) -> Read:
        """`asked` = columns that were asked for, of which a block drafter may have left some out."""
        wide = size.columns
        verified = told[2 * wide] if size.block else asked
        return cls(told[:verified], told[wide : wide + verified - 1], told[2 * wide - 1])


def known_ahead(flight: Flight, rows: Sequence[WholeRow], most: int) -> bool:
    """Whether the card knows the round after this one: all of its sequences go on, nobody's drafts come from the host, every
    stop id is told, and it is not larger than they need. `most` sequences are the largest launch."""
    alike = all(row.left and not row.given and not row.eager and len(row.stops) <= STOPS for row in rows)
    live = [seat for seat in flight.seats if seat.columns]
    return alike and len(rows) >= len(live) and _suits(flight.size, live, most)


def _suits(size: Round, live: Sequence[Seat], most: int) -> bool:
    """Whether the launch would still be chosen for those who go on: else it would be as large as for all that ever were in
    it, since rounds follow one another for as long as nobody joins."""
    drafting = {seat.by for seat in live if seat.k}
    makers = bool(size.head), size.block
    return bucket(len(live), most) == size.sequences and makers == (By.HEAD in drafting, By.BLOCK in drafting)


def next_seat(seat: Seat, read: Read, row: WholeRow | None) -> Seat:
    """Where a sequence stands after a round, as the card reckons it; no columns = it ended."""
    committed = read.committed if seat.columns and row is not None else 0
    picks = read.picks[:committed]
    anchor = picks[-1] if picks else 0
    left = seat.left - committed
    if row is None or not picks or anchor < 0 or anchor in row.stops:
        left = 0
    wide = seat.k + 1
    if seat.rungs:
        wide = min(max(committed + 1, LEAST_COLUMNS), seat.rungs)
    width = min(max(left, 0), wide)
    return Seat(
        slot=seat.slot,
        start=seat.start + committed,
        anchor=anchor,
        columns=width,
        k=max(width - 1, 0) if seat.by is not By.HOST else 0,
        left=left,
        caught_up=tuple(picks),
        by=seat.by,
        rungs=seat.rungs,
    )


def results(flight: Flight, read: Sequence[Read]) -> list[WholeResult]:
    """What a round decided, by seat. One operation cuts its rows apart: a slice a sequence would cost as much as all else
    that is read."""
    hiddens, wide = flight.hidden.unbind(0), flight.size.columns
    taps = flight.taps.unbind(0) if flight.taps is not None else (None,) * len(read)
    return [
        WholeResult(
            drafts=one.drafts,
            picks=one.picks,
            hidden=_verified(hidden, one, wide),
            taps=_verified(tap, one, wide) if tap is not None else None,
        )
        for one, hidden, tap in zip(read, hiddens, taps, strict=True)
    ]


def _verified(rows: Tensor, one: Read, wide: int) -> Tensor:
    """Of [C, ...] the columns that were verified: most often all of them."""
    return rows if len(one.picks) == wide else rows[: len(one.picks)]
