"""The context of a block drafter: which rows of the trunk it has taken in, slot by slot, and what it proposes from them.

    verify ──seen──> open ──accepted──> waiting ──settle──> ring (window + block rows a slot)
    prefill ──primed──────────────────> waiting       └── take/restore: tails of snapshots, as for sliding layers

Only committed rows enter. A slot whose rows have a gap (some were decoded by another drafter) is not *covered* until the
rows after the gap fill a whole tail: it proposes nothing, since the window would be short (R-D2). A snapshot taken of
such a slot has no tail, which is not the same as an empty one (R-G4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.sampling import PickPlan
from services.gpu_worker.engine.batch import BlockAsk
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.models.block import BlockDrafter
from services.gpu_worker.engine.models.block_heads import BlockHeads, Proposal
from services.gpu_worker.engine.models.block_pass import BlockPass
from services.gpu_worker.engine.models.block_ring import DraftRing
from services.gpu_worker.engine.models.block_walk import BlockWalk
from services.gpu_worker.engine.models.family import Model
from shared.errors import EngineFault

BACKLOG_ROWS: Final = 32
"""Committed rows of a slot that wait before they are taken in even though no draft was asked for."""


class _Rows(NamedTuple):
    """Rows from `start` on: tapped ones [n, taps * H], or features [n, H]."""

    start: int
    values: Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.values)


class BlockContext:
    """One an engine. Not thread-safe: the engine's thread owns it."""

    def __init__(self, drafter: BlockDrafter, target: Model, *, num_slots: int, num_snapshots: int) -> None:
        self.drafter = drafter
        self.dims = drafter.dims
        self._heads = BlockHeads(drafter, target)
        self.ring = DraftRing(drafter.dims, num_slots, num_snapshots, drafter.placement)
        self._pass = BlockPass(drafter, target, self.ring, most=num_slots)
        self._walk = BlockWalk(self._heads, drafter.placement.device)
        self._nothing = torch.empty(
            0,
            len(drafter.dims.taps) * drafter.dims.hidden,
            dtype=drafter.placement.dtype,
            device=self.ring.k.device,
        )
        self._present = [False] * num_snapshots
        self._open: dict[int, _Rows] = {}
        self._tapped: dict[int, list[_Rows]] = {}
        self._features: dict[int, list[_Rows]] = {}
        self._wanted: dict[int, list[int]] = {}
        """Positions at which a snapshot waits for its tail."""
        self.passes = 0
        """Blocks drafted, ever."""

    # -- rows come in -------------------------------------------------------------------------------------------

    def primed(self, slot: int, start: int, taps: Tensor, *, defer: bool = False) -> None:
        """Prompt rows from `start` on were computed; `taps` [n, taps * H]. `defer` = they wait for `settle`."""
        self._read_taps([slot])
        kept = taps[-self._capacity :]
        rows = _Rows(start + len(taps) - len(kept), self.drafter.features(kept))
        self._features.setdefault(slot, []).append(rows)
        if not defer:
            self.settle([slot])
            return
        wanted = [rows.end, *self._wanted.get(slot, ())]
        self._features[slot] = [
            part
            for part in self._features[slot]
            if any(part.start < position and part.end > position - self.dims.tail_rows for position in wanted)
        ]

    def seen(self, slot: int, start: int, taps: Tensor) -> None:
        """A verify ran rows from `start` on, which `accepted` commits or not."""
        self._open[slot] = _Rows(start, taps)

    def accepted(self, slot: int, count: int) -> None:
        """The first `count` rows of the slot's last verify were committed. Nothing, if it was not tapped."""
        rows = self._open.pop(slot, None)
        if rows is None or not count:
            return
        waiting = self._tapped.setdefault(slot, [])
        waiting.append(_Rows(rows.start, rows.values[:count]))
        if sum(len(part.values) for part in waiting) >= BACKLOG_ROWS and slot not in self._features:
            self.settle([slot])

    def settle(self, slots: Sequence[int], *, upto: int | None = None) -> None:
        """Take in what waits; with `upto`, of one slot, the rows before that position alone."""
        self._read_taps(slots)
        due = [(slot, rows) for slot in slots for rows in self._features.pop(slot, ())]
        if upto is None:
            for slot in slots:
                self._wanted.pop(slot, None)
        if upto is not None:
            later = [(slot, _after(rows, upto)) for slot, rows in due if rows.end > upto]
            due = [(slot, _before(rows, upto)) for slot, rows in due if rows.start < upto]
            for slot, rows in later:
                self._features.setdefault(slot, []).append(rows)
        if due:
            self._write(due)

    def _read_taps(self, slots: Sequence[int]) -> None:
        """Tapped rows become features, behind those that wait already."""
        tapped = [(slot, rows) for slot in slots for rows in self._tapped.pop(slot, ())]
        if tapped:
            features = self.drafter.features(torch.cat([rows.values for _, rows in tapped]))
            parts = features.split([len(rows.values) for _, rows in tapped])
            for (slot, rows), part in zip(tapped, parts, strict=True):
                self._features.setdefault(slot, []).append(_Rows(rows.start, part))

    def waiting(self, slot: int) -> int:
        """Committed rows that are not taken in."""
        parts = [*self._tapped.get(slot, ()), *self._features.get(slot, ())]
        return sum(len(part.values) for part in parts)

    def covers(self, slot: int, position: int) -> bool:
        """Whether the drafter has, or will have once settled, all that a block at `position` sees."""
        parts = [*self._features.get(slot, ()), *self._tapped.get(slot, ())]
        low, end = self.ring.low(slot), self.ring.end(slot)
        for part in parts:
            low, end = (low if part.start == end else part.start), part.end
        return end == position and low <= max(0, position - self.dims.tail_rows)

    def _write(self, due: Sequence[tuple[int, _Rows]]) -> None:
        positions, places, features = [], [], []
        for slot, rows in due:
            if rows.start != self.ring.end(slot):
                self.ring.begin(slot, rows.start)
            self.ring.wrote(slot, rows.end)
        for slot, rows in due:  # those that later ones of the same slot overwrite are left out
            first = max(rows.start, self.ring.low(slot))
            if first < rows.end:
                features.append(rows.values[first - rows.start :])
                positions.append(torch.arange(first, rows.end, device=rows.values.device))
                places.append(self.ring.places(slot, first, rows.end))
        slots, offsets = (torch.cat(parts) for parts in zip(*places, strict=True))
        self._put(torch.cat(features), torch.cat(positions), slots, offsets)

    def _put(self, features: Tensor, positions: Tensor, slots: Tensor, offsets: Tensor) -> None:
        keys, values = self.drafter.context_rows(features, positions)
        # What is hidden later has no weight, but a NaN of a broken row would still be one.
        self.ring.k[:, slots, :, offsets] = keys.nan_to_num_()
        self.ring.v[:, slots, :, offsets] = values.nan_to_num_()

    @property
    def _capacity(self) -> int:
        """Rows of a ring, whatever the position of the newest one in its block."""
        return (self.ring.blocks_each - 1) * BLOCK_ROWS

    # -- drafts -------------------------------------------------------------------------------------------------

    def propose(self, asks: Sequence[BlockAsk]) -> list[Proposal]:
        """One pass over the blocks of all that ask. Raises EngineFault when a slot is not covered."""
        slots = [ask.slot for ask in asks]
        self.settle(slots)
        for ask in asks:
            if not self.covers(ask.slot, ask.start):
                raise EngineFault(f"a block at {ask.start}: slot {ask.slot} does not have its window's rows")
        self.passes += len(asks)
        return self._heads.propose(self._pass.run(asks), max(ask.k for ask in asks))

    # -- rounds that a card runs whole --------------------------------------------------------------------------

    @property
    def scratch(self) -> int:
        """A slot for rows that are nobody's."""
        return self.ring.scratch

    def hand_over(self, slot: int, position: int, most: int) -> Tensor | None:
        """[n, taps * H], n <= `most`: the committed rows before `position` that wait, for a card's round to take in, which
        thereby has them. Others are taken in now. Null when the drafter lacks rows that a block at `position` sees."""
        waiting = self._tapped.get(slot, [])
        count = sum(len(part.values) for part in waiting)
        follows = not waiting or waiting[0].start == self.ring.end(slot)
        if slot in self._features or count > most or not follows:
            self.settle([slot])
            waiting = []
        if not self.covers(slot, position):
            return None
        rows = torch.cat([part.values for part in waiting]) if waiting else self._nothing
        self.took_in(slot, position)
        return rows

    def took_in(self, slot: int, end: int) -> None:
        """A card's round took in the slot's rows up to `end`, which follow those that it had."""
        self._tapped.pop(slot, None)
        self.ring.wrote(slot, end)
        self.passes += 1

    def take_in(self, taps: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Write context rows of tapped ones [M, taps * H] at `positions` [M] of `slots` [M]; part of a captured launch."""
        self._put(self.drafter.features(taps), positions, slots, positions % self.ring.rows_each)

    def draft(
        self, slots: Tensor, starts: Tensor, lows: Tensor, anchors: Tensor, most: int, rules: PickPlan
    ) -> tuple[Tensor, Tensor]:
        """One pass and the walk over its rows, for S sequences; part of a captured launch. See `BlockWalk`; `lows` as in
        `BlockPass`."""
        return self._walk(self._pass.block(slots, starts, lows, anchors), anchors, starts, most, rules)

    # -- the slot's memory --------------------------------------------------------------------------------------

    @property
    def tail_bytes(self) -> int:
        """Bytes of one tail: layers x (window + block) rows x KV heads x head x bytes x 2."""
        return self.ring.tail_bytes

    @property
    def tail_size(self) -> int:
        """Elements of one tail."""
        return self.ring.tail_size

    def reset(self, slot: int) -> None:
        """No rows."""
        self._forget(slot)
        self.ring.reset(slot)

    def take(self, slot: int, snapshot: int, position: int) -> None:
        """Keep the tail at `position`, if the drafter has it by now; rows that wait by intent are not taken in."""
        if slot not in self._features:
            self.settle([slot])
        self._present[snapshot] = self._covered(slot, position)
        if self._present[snapshot]:
            self.ring.take(slot, snapshot, position)
        elif slot in self._features:
            self._wanted.setdefault(slot, []).append(position)

    def complete(self, slot: int, snapshot: int, position: int) -> bool:
        """Give a snapshot taken at `position` the tail that it lacks, as far as rows wait for it. False: it has none."""
        if not self._present[snapshot]:
            self.settle([slot], upto=position)
            self._present[snapshot] = self._covered(slot, position)
            if self._present[snapshot]:
                self.ring.take(slot, snapshot, position)
        return self._present[snapshot]

    def tail(self, slot: int, upto: int) -> Tensor | None:
        """[2, tail rows, layers, KV heads, head], keys first: what was taken in before `upto`; null if not all of it."""
        return self.ring.tail(slot, upto) if self._covered(slot, upto) else None

    def has_tail(self, snapshot: int) -> bool:
        """Whether a snapshot has a draft tail."""
        return self._present[snapshot]

    def restore(self, snapshot: int, slot: int, position: int) -> None:
        """Make the slot's rows those of the snapshot's tail, or none."""
        self._forget(slot)
        if self._present[snapshot]:
            self.ring.restore(snapshot, slot, position)
        else:
            self.ring.begin(slot, position)

    def read(self, snapshot: int) -> Tensor:
        """Copy a tail out, flat; one that is not there is told by NaN."""
        values = self.ring.read(snapshot)
        return values if self._present[snapshot] else torch.full_like(values, torch.nan)

    def write(self, snapshot: int, values: Tensor) -> None:
        """Copy into a tail what `read` answered."""
        self._present[snapshot] = not bool(torch.isnan(values[0]))
        self.ring.write(snapshot, values)

    def _covered(self, slot: int, position: int) -> bool:
        return position <= self.ring.end(slot) and self.ring.low(slot) <= max(
            0, position - self.dims.tail_rows
        )

    def _forget(self, slot: int) -> None:
        for rows in (self._open, self._tapped, self._features, self._wanted):
            rows.pop(slot, None)


def _before(rows: _Rows, position: int) -> _Rows:
    return _Rows(rows.start, rows.values[: position - rows.start])


def _after(rows: _Rows, position: int) -> _Rows:
    first = max(0, position - rows.start)
    return _Rows(rows.start + first, rows.values[first:])
