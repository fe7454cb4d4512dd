"""What a round on a card is asked for and answers, and what is known of one that is on its way. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.advance import STOPS
from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.graphs import Size
from services.gpu_worker.engine.requests import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRow:
    """One sequence of a round. Its columns are the anchor and either `given` drafts or `k` that the head makes."""

    slot: int
    start: int
    anchor: int
    block_table: Sequence[int]
    rules: SamplingParams
    choice: int
    given: Sequence[int] = ()
    k: int = 0
    catch_up: DraftRows | None = None
    """With k: rows of the draft plane up to the anchor's, which the head reads first."""
    left: int = 0
    """Rows that the stream may still commit, this round's among them; 0 = its next round is not known in advance."""
    stops: frozenset[int] = frozenset()
    eager: bool = False

    @property
    def columns(self) -> int:
        return 1 + (self.k or len(self.given))


class WholeResult(NamedTuple):
    """What a round decided: the drafts, the pick of every column (-1 = a broken row), hidden [columns, H]."""

    drafts: list[int]
    picks: list[int]
    hidden: Tensor


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

    def holds(self, row: WholeRow) -> bool:
        """Whether this is the round that the row asks for."""
        tokens = tuple(row.catch_up.tokens) if row.catch_up is not None else ()
        return not row.given and (row.slot, row.start, row.anchor, row.columns, row.k, tokens) == (
            self.slot,
            self.start,
            self.anchor,
            self.columns,
            self.k,
            self.caught_up if self.k else (),
        )


@dataclass(frozen=True, slots=True)
class Flight:
    """A round on its way."""

    size: Size
    seats: list[Seat]
    told: Tensor
    hidden: Tensor
    done: torch.cuda.Event | None


def known_ahead(flight: Flight, rows: Sequence[WholeRow]) -> bool:
    """Whether the card knows the round after this one: all of its sequences go on, all draft or none, nobody's drafts
    come from elsewhere, and every stop id is told."""
    drafting = any(seat.k for seat in flight.seats)
    alike = all(
        row.left and not row.given and not row.eager and (row.k > 0) == drafting and len(row.stops) <= STOPS
        for row in rows
    )
    return alike and len(rows) >= sum(1 for seat in flight.seats if seat.columns)


def next_seat(seat: Seat, told: list[int], row: WholeRow | None) -> Seat:
    """Where a sequence stands after a round, as the card reckons it; no columns = it ended."""
    committed = told[-1] if seat.columns and row is not None else 0
    picks = told[:committed]
    anchor = picks[-1] if picks else 0
    left = seat.left - committed
    if row is None or not picks or anchor < 0 or anchor in row.stops:
        left = 0
    width = min(max(left, 0), seat.k + 1)
    k = width - 1 if seat.k else 0
    return Seat(seat.slot, seat.start + committed, anchor, width, k, left, tuple(picks))
