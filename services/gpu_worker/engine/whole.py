"""Rounds run whole on a card for sequences that the host fills in and reads again: one launch, one small copy back.

The host stays the one who knows where a stream stands: it walks the picks by its own rules and commits. So that the card
need not wait for it, the next round of the same sequences is launched before the host has read this one (`more`): the card
knows where they go on. What the host reads then tells it where that is. When it asks for just that round, it is there
already; when it asks for anything else (a stream joined, was cancelled, drafts otherwise), what flies is landed and its
rows are nobody's. A round may fly from one burst into the next: `make_way` or `land` comes before anything else is done with
a slot that it has, and before such a slot is given away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.advance import NO_STOP, STOPS
from kernels.tiles import ROWS
from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.device_rounds import DeviceRounds, Told
from services.gpu_worker.engine.flights import (
    By,
    Flight,
    Read,
    Round,
    Seat,
    WholeResult,
    WholeRow,
    known_ahead,
    next_seat,
    results,
)
from services.gpu_worker.engine.graphs import bucket, buckets
from services.gpu_worker.engine.inputs import RoundInputs
from services.gpu_worker.engine.layers.steps import Span
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.family import Model
from services.gpu_worker.engine.requests import SamplingParams


class WholeRounds:
    """`catch_up` writes rows of the draft plane that are more than a round has room for."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        states: StatePool,
        config: EngineConfig,
        blocks: int,
        catch_up: Callable[[DraftRows], object],
        *,
        ring: RingPool | None = None,
        block: BlockContext | None = None,
    ) -> None:
        self._states = states
        self._vocab = model.dims.vocab
        self._catch_up = catch_up
        self._drafts = model.mtp is not None
        self._pinned = states.placement.graphs
        device = kv.k.device
        self._inputs = RoundInputs(config.max_batch, states.max_verify, blocks, device, states.scratch)
        self._block = block
        self._rounds = DeviceRounds(model, kv, states, self._inputs, ring=ring, block=block)
        most, columns = config.max_batch, states.max_verify
        self._told = [
            torch.zeros(most * (2 * columns + 1), dtype=torch.int32, pin_memory=self._pinned)
            for _ in range(2)
        ]
        self._done = [torch.cuda.Event() if self._pinned else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream(device) if self._pinned else None
        self._buffer = torch.zeros(Told.room(most, columns), dtype=torch.int32, pin_memory=self._pinned)
        begun = Told.of(self._buffer, most, columns)
        self._begun = {name: part.numpy() for name, part in begun._asdict().items()}
        self._seated: list[tuple[SamplingParams, int]] = []
        self._flight: Flight | None = None
        self.uncaptured = False
        """Whether the last round wanted a graph that could not be captured."""

    def prepare(self, drafts: int, report: Callable[[str], None]) -> None:
        """Capture rounds of every number of sequences with no drafts, with `drafts` by the head and with a block's."""
        sequences = buckets(self._inputs.sequences)
        kinds = [Round(0, 1)]
        columns = min(1 + drafts, self._inputs.columns)
        if columns > 1 and self._drafts:
            kinds.append(Round(0, columns, head=columns - 1))
        if drafts and self._block is not None:
            kinds.append(Round(0, self._block_columns, block=True))
        for kind in kinds:
            self._rounds.graphs.prepare_all([kind._replace(sequences=count) for count in sequences], report)

    def run(self, rows: Sequence[WholeRow], *, more: bool = False) -> list[WholeResult]:
        """One round; slots are distinct. `accept` must follow for each, as after a verify. `more` = another round of
        the same sequences is likely to be asked for next."""
        flight = self._arrived(rows)
        if flight is None:
            flight, rows = self._launch(rows)
        for row in rows:
            self._states.verified(row.slot, row.columns)
        more = more and known_ahead(flight, rows, self._inputs.sequences)
        ahead = self._fly_blind(flight, rows) if more else None
        if flight.done is not None:
            flight.done.synchronize()
        read = [
            Read.of(told, flight.size, seat.columns)
            for told, seat in zip(flight.told.tolist(), flight.seats, strict=True)
        ]
        if more:
            self._flight = self._fly_on(flight, rows, read, ahead)
        told = dict(zip((seat.slot for seat in flight.seats), results(flight, read), strict=True))
        return [told[row.slot] for row in rows]

    def make_way(self, slots: Collection[int]) -> None:
        """Something else is about to be done with these slots: nothing that has any of them is to be on its way."""
        if self._flight is not None and not self._flight.slots.isdisjoint(slots):
            self.land()

    def land(self, but: Collection[int] = ()) -> None:
        """Nothing is to be on its way, or only what has all its sequences in the slots `but`: what a flight folded is
        noted, its rows are nobody's."""
        if self._flight is not None and self._flight.slots and self._flight.slots.issubset(but):
            return
        flight, self._flight = self._flight, None
        if flight is not None:
            self._note([seat for seat in flight.seats if seat.columns])

    def _note(self, seats: Sequence[Seat]) -> None:
        """Nobody asks for their rows of a round; a state that it stored is one all the same."""
        for seat in seats:
            if not self._states.is_open(seat.slot):
                self._states.verified(seat.slot, seat.columns)
                self._states.accept(seat.slot, 0)

    def _arrived(self, rows: Sequence[WholeRow]) -> Flight | None:
        """What flies, if it is what the rows ask for; landed otherwise."""
        flight = self._flight
        if flight is None:
            return None
        of_slot = {seat.slot: seat for seat in flight.seats if seat.columns}
        if not all(row.slot in of_slot and of_slot[row.slot].holds(row) for row in rows):
            self.land()
            return None
        self._flight = None
        for row in rows:
            if row.by is By.BLOCK and self._block is not None:
                self._block.took_in(row.slot, row.start)
        asked = {row.slot for row in rows}
        self._note([seat for slot, seat in of_slot.items() if slot not in asked])
        return flight

    def _launch(self, rows: Sequence[WholeRow]) -> tuple[Flight, list[WholeRow]]:
        """Fill the inputs and go; with the rows as they went, a drafter that cannot left out."""
        taps = {row.slot: self._taken(row) for row in rows if row.by is By.BLOCK and row.k}
        rows = [row if taps.get(row.slot, row) is not None else replace(row, k=0, by=By.HOST) for row in rows]
        size = self._size(rows)
        eager, graphs = any(row.eager for row in rows), self._rounds.graphs
        self.uncaptured = not eager and graphs.enabled and not graphs.prepare(size)
        self._fill(rows, size, taps)
        seats = [
            Seat(
                slot=row.slot,
                start=row.start,
                anchor=row.anchor,
                columns=row.columns,
                k=row.k,
                left=row.left,
                caught_up=(),
                by=row.by if row.k else By.HOST,
                rungs=row.rungs,
            )
            for row in rows
        ]
        return self._go(size, seats, eager=eager), rows

    def _taken(self, row: WholeRow) -> Tensor | None:
        """Rows for the block drafter to take in; null when it cannot draft here."""
        assert self._block is not None
        return self._block.hand_over(row.slot, row.start, self._block_columns)

    def _size(self, rows: Sequence[WholeRow]) -> Round:
        """Drafting rounds have the columns that are wanted, or all that a block has drafts for; others the next bucket, so
        that drafts which come from the host have few graphs."""
        head = max((row.k for row in rows if row.by is By.HEAD), default=0)
        block = any(row.k for row in rows if row.by is By.BLOCK)
        columns = max(row.columns for row in rows)
        if block:
            columns = max(columns, self._block_columns)
        elif not head:
            columns = bucket(columns, self._inputs.columns)
        return Round(bucket(len(rows), self._inputs.sequences), columns, head, block)

    @property
    def _block_columns(self) -> int:
        assert self._block is not None
        return min(1 + self._block.dims.drafts, self._inputs.columns)

    def _go(self, size: Round, seats: list[Seat], *, eager: bool) -> Flight:
        told = self._rounds.graphs.run(size, eager=eager)
        host, done = self._told[0], self._done[0]
        self._told.reverse()
        self._done.reverse()
        kept = host[: len(seats) * told.shape[1]].view(len(seats), -1)
        kept.copy_(told[: len(seats)], non_blocking=self._pinned)
        hidden = self._rounds.state.tail_hidden[: len(seats), : size.columns].clone()
        taps = None
        if self._block is not None:
            taps = self._rounds.tail_taps[: len(seats), : size.columns].clone()
        if done is not None:
            done.record(self._stream)
        return Flight(size, seats, kept, hidden, taps, done)

    def _fly_blind(self, flight: Flight, rows: Sequence[WholeRow]) -> Flight | None:
        """Launch the round after one that is not read yet, where every table has room for it whatever is accepted, and
        some sequence surely has rows left. Its seats are not known yet."""
        tables = {row.slot: row.block_table for row in rows}
        live = [seat for seat in flight.seats if seat.columns]
        fits = all(seat.furthest <= len(tables[seat.slot]) * ROWS for seat in live)
        if not fits or all(seat.left <= seat.columns for seat in live):
            return None
        self._inputs.refresh([tables.get(seat.slot) for seat in flight.seats])
        return self._go(flight.size, flight.seats, eager=False)

    def _fly_on(
        self, flight: Flight, rows: Sequence[WholeRow], read: Sequence[Read], ahead: Flight | None
    ) -> Flight | None:
        """The round after one that was read: `ahead` with its seats, or launched now, if there is room in every table."""
        of_slot = {row.slot: row for row in rows}
        seats = [
            next_seat(seat, read[number], of_slot.get(seat.slot)) for number, seat in enumerate(flight.seats)
        ]
        if ahead is not None:
            return replace(ahead, seats=seats)
        live = [seat for seat in seats if seat.columns]
        tables = {seat.slot: of_slot[seat.slot].block_table for seat in live}
        if not live or any(seat.start + seat.columns > len(tables[seat.slot]) * ROWS for seat in live):
            return None
        self._inputs.refresh([tables.get(seat.slot) for seat in seats])
        return self._go(flight.size, seats, eager=False)

    def _fill(self, rows: Sequence[WholeRow], size: Round, taps: Mapping[int, Tensor | None]) -> None:
        """`taps` of the slots that a block drafter drafts for: rows that it takes in first."""
        spans = [Span(row.start, row.columns, row.block_table) for row in rows]
        ids = [[row.anchor, *row.given, *(0,) * row.k] for row in rows]
        self._buffer.zero_()
        told = self._begun
        told["stops"][:] = NO_STOP
        for number, row in enumerate(rows):
            ends = sorted(row.stops)[:STOPS]
            told["stops"][number, : len(ends)] = ends
            told["left"][number], told["wide"][number] = row.left or row.columns, row.columns
            told["by"][number] = row.by if row.k else By.HOST
            if row.catch_up is not None:
                self._take(number, row.catch_up, size.columns)
            unread = taps.get(row.slot)
            if self._block is not None and unread is not None:
                told["unread"][number], told["rungs"][number] = len(unread), row.rungs
                told["low"][number] = self._block.ring.low(row.slot)
                if len(unread):
                    self._rounds.tail_taps[number, : len(unread)] = unread
        self._inputs.fill(spans, ids, size[:2], [row.slot for row in rows], self._states)
        self._rounds.buffer.copy_(self._buffer, non_blocking=True)
        seats = [(row.rules, row.choice) for row in rows]
        if seats != self._seated:
            self._seated = seats
            self._rounds.rules.fill(
                [row.rules for row in rows], [row.choice for row in rows], vocab=self._vocab
            )

    def _take(self, number: int, catch_up: DraftRows, columns: int) -> None:
        """Hand a sequence's last `columns` rows to the round; what is before them is written now."""
        spare = max(0, len(catch_up.tokens) - columns)
        if spare:
            self._catch_up(catch_up.part(0, spare))
        tokens = catch_up.tokens[spare:]
        self._begun["tail_tokens"][number, : len(tokens)] = tokens
        self._begun["tail_counts"][number] = len(tokens)
        tail = self._rounds.state.tail_hidden
        tail[number, : len(tokens)] = catch_up.hiddens[spare:].to(tail.device, tail.dtype)
