"""Sequences come in: a slot, blocks, and what they go on from, with references of their own.

    hit (`holds`) ──┐
    decode-made ────┴─admit──> sequence ──grow──> more blocks ──end──> its guard gives all of it back

Takes everything or nothing. Knows rows and states. Does not know who waits, nor what runs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.gpu_worker.engine.cache.captures import Snapshots
from services.gpu_worker.engine.cache.decoded import DecodedState
from services.gpu_worker.engine.cache.decoded_pool import DecodedStates
from services.gpu_worker.engine.cache.holds import Holds
from services.gpu_worker.engine.cache.pages import BlockAllocator, IdPool
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sequence import SequenceState
from shared.errors import EngineFault


class States(Snapshots, Protocol):
    """What is asked of the recurrent states' pool."""

    def reset(self, slot: int) -> None: ...

    def restore(self, snapshot: int, slot: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """What a sequence starts from."""

    hit_key: bytes | None
    last_hidden: Tensor | None  #: of the row before the restored position; null when cold


class Admissions:
    """Into the pools of one cache."""

    def __init__(
        self, blocks: BlockAllocator, slots: IdPool, states: States, *, holds: Holds, decoded: DecodedStates
    ) -> None:
        self._blocks = blocks
        self._slots = slots
        self._states = states
        self._holds = holds
        self._decoded = decoded
        self._generations = itertools.count(1)

    def base(self, request: GenerateRequest, checkpoint: DecodedState | None) -> DecodedState | None:
        """What a sequence goes on from instead of its hit: the stream's own checkpoint, or else, if it opted in, the
        longest parked session that is deeper than the hit."""
        if checkpoint is not None and checkpoint.alive:
            return checkpoint
        if request.reuse != "decode" or not request.use_cache:
            return None
        hold = self._holds.usable(request)
        found = self._decoded.find(request.root, request.tokens)
        return found if found and found.position > (hold.entry.position if hold else 0) else None

    def fresh_blocks(
        self, request: GenerateRequest, rows: int | None = None, base: DecodedState | None = None
    ) -> int:
        """Blocks to allocate for `rows` (null = prompt and whole budget) beyond what `base` or else the hold brings."""
        rows = len(request.tokens) + request.max_tokens if rows is None else rows
        if base is not None:
            return -(-max(rows, base.position + 1) // BLOCK_ROWS) - base.shared
        hold = self._holds.usable(request)
        return -(-rows // BLOCK_ROWS) - (len(hold.blocks) if hold else 0)

    def admit(
        self,
        request: GenerateRequest,
        sequence: SequenceState,
        rows: int | None = None,
        base: DecodedState | None = None,
    ) -> Admission | None:
        """Give a sequence its slot and blocks for `rows`, and restore `base` or else its hit; null, and nothing taken,
        when they do not fit."""
        fresh = self._blocks.allocate(self.fresh_blocks(request, rows, base))
        if fresh is None:
            return None
        slot = self._slots.acquire()
        if slot is None:
            self._blocks.release(fresh)
            return None
        sequence.mtp_store_gen = next(self._generations)
        sequence.block_table = fresh
        sequence.slot_idx = slot
        sequence.guard.add(lambda: self._slots.release(slot))
        sequence.guard.add(lambda: _release_table(self._blocks, sequence))
        self._states.reset(slot)
        if base is not None:
            self._holds.abandon(request.request_id)
            return Admission(hit_key=None, last_hidden=self._decoded.restore(base, sequence))
        return self._restore(request, sequence, slot)

    def grow(self, sequence: SequenceState, rows: int) -> bool:
        """Give a running sequence room for `rows` more, as far as there are free blocks. True when it has any."""
        short = -(-(sequence.seq_len + rows) // BLOCK_ROWS) - len(sequence.block_table)
        if short > 0:
            sequence.block_table.extend(self._blocks.allocate(min(short, self._blocks.free)) or ())
        return sequence.rows_left > 0

    def _restore(self, request: GenerateRequest, sequence: SequenceState, slot: int) -> Admission:
        hold = self._holds.usable(request)
        admission = Admission(hit_key=None, last_hidden=None)
        if hold is not None:
            state = hold.entry.state
            if state is None:
                raise EngineFault("a held entry lost its state")
            self._blocks.retain(hold.blocks)
            sequence.apply_hit(hold.tokens, hold.blocks)
            self._states.restore(state.snapshot, slot)
            if hold.entry.position == len(request.tokens):
                sequence.marconi_exact_snap = state.snapshot
            admission = Admission(hit_key=hold.entry.key, last_hidden=state.last_hidden)
        self._holds.abandon(request.request_id)
        return admission


def _release_table(blocks: BlockAllocator, sequence: SequenceState) -> None:
    blocks.release(sequence.block_table)
    sequence.block_table = []
