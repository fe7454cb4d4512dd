"""Rounds run whole on a card for sequences that the host fills in and reads again: one launch, one small copy back.

The host stays the one who knows where a stream stands: it walks the picks by its own rules and commits. So that the card
need not wait for it, the next round of the same sequences is launched before the host has read this one (`more`): the card
knows where they go on. What the host reads then tells it where that is. When it asks for just that round, it is there
already; when it asks for anything else (a stream joined, was cancelled, drafts otherwise), what flies is landed and its
rows are nobody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kernels.advance import NO_STOP, STOPS
from kernels.tiles import ROWS
from services.gpu_worker.engine.batch import DraftRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.device_rounds import DeviceRounds, Told
from services.gpu_worker.engine.flights import Flight, Seat, WholeResult, WholeRow, known_ahead, next_seat
from services.gpu_worker.engine.graphs import Size, bucket, buckets
from services.gpu_worker.engine.inputs import RoundInputs
from services.gpu_worker.engine.layers.steps import Span
from services.gpu_worker.engine.models.hybrid import HybridModel
from services.gpu_worker.engine.requests import SamplingParams


class WholeRounds:
    """`catch_up` writes rows of the draft plane that are more than a round has room for."""

    def __init__(
        self,
        model: HybridModel,
        kv: KVPool,
        states: StatePool,
        config: EngineConfig,
        blocks: int,
        catch_up: Callable[[DraftRows], object],
    ) -> None:
        self._states = states
        self._vocab = model.dims.vocab
        self._catch_up = catch_up
        self._drafts = model.mtp is not None
        self._pinned = states.placement.graphs
        device = kv.k.device
        self._inputs = RoundInputs(config.max_batch, states.max_verify, blocks, device, states.scratch)
        self._rounds = DeviceRounds(model, kv, states, self._inputs)
        most, columns = config.max_batch, states.max_verify
        self._told = [
            torch.zeros(most * 2 * columns, dtype=torch.int32, pin_memory=self._pinned) for _ in range(2)
        ]
        self._done = [torch.cuda.Event() if self._pinned else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream(device) if self._pinned else None
        self._buffer = torch.zeros(Told.room(most, columns), dtype=torch.int32, pin_memory=self._pinned)
        self._begun = Told.of(self._buffer, most, columns)
        self._seated: list[tuple[SamplingParams, int]] = []
        self._flight: Flight | None = None
        self.uncaptured = False
        """Whether the last round wanted a graph that could not be captured."""

    def prepare(self, drafts: int, report: Callable[[str], None]) -> None:
        """Capture rounds of every number of sequences with no drafts, and with `drafts` by the head."""
        sequences = buckets(self._inputs.sequences)
        self._rounds.verifies.prepare_all([(count, 1) for count in sequences], report)
        columns = min(1 + drafts, self._inputs.columns)
        if columns > 1 and self._drafts:
            self._rounds.graphs.prepare_all([(count, columns) for count in sequences], report)

    def run(self, rows: Sequence[WholeRow], *, more: bool = False) -> list[WholeResult]:
        """One round; slots are distinct. `accept` must follow for each, as after a verify. `more` = another round of
        the same sequences is likely to be asked for next."""
        flight = self._arrived(rows) or self._launch(rows)
        for row in rows:
            self._states.verified(row.slot, row.columns)
        more = more and known_ahead(flight, rows)
        ahead = self._fly_blind(flight, rows) if more else None
        if flight.done is not None:
            flight.done.synchronize()
        told = flight.told.tolist()
        if more:
            self._flight = self._fly_on(flight, rows, told, ahead)
        of_slot = {seat.slot: number for number, seat in enumerate(flight.seats)}
        return [_result(row, told[of_slot[row.slot]], flight, of_slot[row.slot]) for row in rows]

    def land(self) -> None:
        """Nothing is to be on its way: what a flight folded is noted, its rows are nobody's."""
        flight, self._flight = self._flight, None
        for seat in flight.seats if flight is not None else ():
            if seat.columns and not self._states.is_open(seat.slot):
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
        asked = {row.slot for row in rows}
        for slot, seat in of_slot.items():
            if slot not in asked and not self._states.is_open(slot):
                self._states.verified(slot, seat.columns)
                self._states.accept(slot, 0)
        return flight

    def _launch(self, rows: Sequence[WholeRow]) -> Flight:
        """Fill the inputs and go."""
        drafting = any(row.k for row in rows)
        widest = max(row.columns for row in rows)
        size = (
            bucket(len(rows), self._inputs.sequences),
            widest if drafting else bucket(widest, self._inputs.columns),
        )
        graphs = self._rounds.graphs if drafting else self._rounds.verifies
        eager = any(row.eager for row in rows)
        self.uncaptured = not eager and graphs.enabled and not graphs.prepare(size)
        self._fill(rows, size)
        seats = [Seat(row.slot, row.start, row.anchor, row.columns, row.k, row.left, ()) for row in rows]
        return self._go(size, seats, drafting, eager)

    def _go(self, size: Size, seats: list[Seat], drafting: bool, eager: bool) -> Flight:
        graphs = self._rounds.graphs if drafting else self._rounds.verifies
        told = graphs.run(size, eager=eager)
        host, done = self._told[0], self._done[0]
        self._told.reverse()
        self._done.reverse()
        kept = host[: len(seats) * told.shape[1]].view(len(seats), -1)
        kept.copy_(told[: len(seats)], non_blocking=self._pinned)
        hidden = self._rounds.state.tail_hidden[: len(seats), : size[1]].clone()
        if done is not None:
            done.record(self._stream)
        return Flight(size, seats, kept, hidden, done)

    def _fly_blind(self, flight: Flight, rows: Sequence[WholeRow]) -> Flight | None:
        """Launch the round after one that is not read yet, where every table has room for it whatever is accepted, and
        some sequence surely has rows left. Its seats are not known yet."""
        tables = {row.slot: row.block_table for row in rows}
        live = [seat for seat in flight.seats if seat.columns]
        furthest = {seat.slot: seat.start + min(2 * seat.k + 2, seat.left) for seat in live}
        fits = all(end <= len(tables[slot]) * ROWS for slot, end in furthest.items())
        if not fits or all(seat.left <= seat.columns for seat in live):
            return None
        self._inputs.refresh([tables.get(seat.slot) for seat in flight.seats])
        return self._go(flight.size, flight.seats, any(seat.k for seat in live), eager=False)

    def _fly_on(
        self, flight: Flight, rows: Sequence[WholeRow], told: list[list[int]], ahead: Flight | None
    ) -> Flight | None:
        """The round after one that was read: `ahead` with its seats, or launched now, if there is room in every table."""
        of_slot = {row.slot: row for row in rows}
        seats = [
            next_seat(seat, told[number], of_slot.get(seat.slot)) for number, seat in enumerate(flight.seats)
        ]
        if ahead is not None:
            return replace(ahead, seats=seats)
        live = [seat for seat in seats if seat.columns]
        tables = {seat.slot: of_slot[seat.slot].block_table for seat in live}
        if not live or any(seat.start + seat.columns > len(tables[seat.slot]) * ROWS for seat in live):
            return None
        self._inputs.refresh([tables.get(seat.slot) for seat in seats])
        return self._go(flight.size, seats, any(seat.k for seat in flight.seats), eager=False)

    def _fill(self, rows: Sequence[WholeRow], size: Size) -> None:
        spans = [Span(row.start, row.columns, row.block_table) for row in rows]
        ids = [[row.anchor, *row.given, *(0,) * row.k] for row in rows]
        self._buffer.zero_()
        _, stops, _, left, wide, given = (part.numpy() for part in self._begun)
        stops[:] = NO_STOP
        for number, row in enumerate(rows):
            ends = sorted(row.stops)[:STOPS]
            stops[number, : len(ends)] = ends
            left[number], wide[number], given[number] = row.left or row.columns, row.columns, not row.k
            if row.catch_up is not None:
                self._take(number, row.catch_up, size[1])
        self._inputs.fill(spans, ids, size, [row.slot for row in rows], self._states)
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
        self._begun.tail_tokens.numpy()[number, : len(tokens)] = tokens
        self._begun.tail_counts[number] = len(tokens)
        tail = self._rounds.state.tail_hidden
        tail[number, : len(tokens)] = catch_up.hiddens[spare:].to(tail.device, tail.dtype)


def _result(row: WholeRow, told: list[int], flight: Flight, number: int) -> WholeResult:
    columns = flight.size[1]
    return WholeResult(
        drafts=told[columns : columns + row.columns - 1],
        picks=told[: row.columns],
        hidden=flight.hidden[number, : row.columns],
    )
