"""Boundary captures: between the prime that takes one and the broker's answer.

    prime reaches a boundary ──capture──> pending ──publish──> entry
                                             └──discard──> free

A pending capture already has its place in the tree, so that later captures are charged as if it were granted; no
lookup finds it. When it is discarded, pending captures that build on it go with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from services.gpu_worker.engine.cache.entry import Capture, StoredState
from services.gpu_worker.engine.cache.moves import Moves
from services.gpu_worker.engine.cache.pages import BlockAllocator, IdPool
from services.gpu_worker.engine.cache.tree import PrefixTree
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sequence import SequenceState


class CaptureFailed(Exception):
    """A boundary could not be captured. Never fails a request; counted (C3, R-S6)."""


class Snapshots(Protocol):
    """What is asked of the recurrent states' pool."""

    def take_snapshot(self, slot: int, snapshot: int) -> None: ...


class Captures:
    """Takes captures and settles them. `pending` by capture id, in the order of their taking."""

    def __init__(
        self,
        tree: PrefixTree,
        blocks: BlockAllocator,
        snapshots: IdPool,
        moves: Moves,
        states: Snapshots,
        *,
        max_pending: int,
    ) -> None:
        self.pending: dict[int, Capture] = {}
        self.failures = 0
        self._tree = tree
        self._blocks = blocks
        self._snapshots = snapshots
        self._moves = moves
        self._states = states
        self._max_pending = max_pending
        self._next = 1

    def boundaries(
        self, request: GenerateRequest, start: int, capture_at: int | None, ckpt_at: int
    ) -> list[int]:
        """Where a prime from `start` should capture: at most the branch point and the checkpoint, ascending.

        The branch point is the longest common prefix with anything in the tree; `capture_at` (what others know)
        counts only when the tree shows none.
        """
        prompt = len(request.tokens)
        path = self._tree.match(request.root, request.tokens, request.chain)
        shared = len(path) * BLOCK_ROWS
        branch = shared if start < shared < prompt else capture_at
        wanted = {position for position in (branch, ckpt_at) if position and start < position <= prompt}
        return sorted(position for position in wanted if not self.has_state(request, position))

    def capture(
        self, request: GenerateRequest, sequence: SequenceState, position: int, last_hidden: Tensor
    ) -> Capture | None:
        """Keep the state that `sequence` has at `position`, its newest row boundary. Null when one is there already.

        Raises CaptureFailed, with nothing taken, when it cannot be kept.
        """
        depth = position // BLOCK_ROWS
        if position % BLOCK_ROWS or not 0 < depth <= len(request.chain) or position != sequence.seq_len:
            raise self._failed(f"position {position} is no boundary of this sequence at {sequence.seq_len}")
        if sequence.from_decode or position > sequence.kv_valid_tokens:
            raise self._failed(f"rows below {position} are not all written by prefill")
        if self.has_state(request, position):
            return None
        chain = request.chain[:depth]
        path = self._tree.match(request.root, request.tokens, chain)
        if self._tree.forks(path, depth):
            raise self._failed("the prefix forks where no entry is")
        if len(self.pending) >= self._max_pending:
            raise self._failed("too many captures wait for the broker")
        snapshot = self._snapshots.acquire()
        if snapshot is None:
            raise self._failed("no snapshot is free")
        self._states.take_snapshot(sequence.ssm_slot_idx(), snapshot)
        state = StoredState(snapshot=snapshot, last_hidden=last_hidden.clone())
        return self._settle(request, sequence, chain, state)

    def _settle(
        self, request: GenerateRequest, sequence: SequenceState, chain: Sequence[bytes], state: StoredState
    ) -> Capture:
        key = chain[-1]
        self._moves.adopt(self._tree.match(request.root, request.tokens, chain), sequence.block_table)
        entry = self._tree.entry(key)
        fresh, splits = entry is None, None
        if entry is None:
            added = self._tree.grow(request.root, request.tokens, chain, sequence.block_table)
            self._blocks.retain(added)
            splits = None if added else self._tree.owner(key)
            entry = self._tree.place(key, splits)
        capture = Capture(
            capture_id=self._next,
            request_id=request.request_id,
            entry=entry,
            fresh=fresh,
            parent=entry.parent,
            splits=splits,
            state=state,
            kv_blocks=entry.blocks if fresh else 0,
        )
        self._next += 1
        self.pending[capture.capture_id] = capture
        return capture

    def publish(self, capture_id: int) -> bool:
        """Make a capture an entry that lookups find. False, with everything released, when it cannot stand."""
        capture = self.pending.get(capture_id)
        if capture is None:
            return False
        ground = [entry for entry in (capture.parent, capture.splits) if entry is not None]
        if capture.fresh and not all(entry.published for entry in ground):
            self._drop(capture)
            return False
        del self.pending[capture_id]
        capture.entry.published = True
        capture.entry.state = capture.state
        self._moves.ruined.pop(capture.entry.key, None)
        self._tree.touch(capture.entry)
        return True

    def discard(self, capture_id: int) -> None:
        """Release a capture and the pending ones that build on it. Unknown ids are ignored."""
        capture = self.pending.get(capture_id)
        if capture is not None:
            self._drop(capture)

    def _drop(self, capture: Capture) -> None:
        """Later captures that were charged on top of this one go first, the newest first, so that splits heal."""
        del self.pending[capture.capture_id]
        if capture.fresh:
            for other in sorted(self.pending.values(), key=lambda c: -c.capture_id):
                later = other.capture_id > capture.capture_id and other.fresh
                if (
                    later
                    and capture.entry in (other.parent, other.splits)
                    and other.capture_id in self.pending
                ):
                    self._drop(other)
            self._moves.forget_rows(self._tree.unplace(capture.entry, capture.splits))
        self._snapshots.release(capture.state.snapshot)

    def has_state(self, request: GenerateRequest, position: int) -> bool:
        """Whether a state of this prompt stands at a boundary, granted or waiting for the broker."""
        entry = self._tree.entry(request.chain[position // BLOCK_ROWS - 1])
        if entry is None:
            return False
        return entry.kept or any(c.entry is entry for c in self.pending.values())

    def _failed(self, why: str) -> CaptureFailed:
        self.failures += 1
        return CaptureFailed(why)
