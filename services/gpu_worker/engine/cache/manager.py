"""The cache's one owner: hands out blocks, slots and snapshots, and keeps the prefix tree.

    lookup ─> hold ──admit──> sequence (own references, state restored) ──end──> guard releases
    prime reaches a boundary ──capture──> pending ──publish──> entry ──evict──> free
                                              └──discard──> free

A pending capture already has its place in the tree, so that later captures are charged as if it were granted; no
lookup finds it. When it is discarded, pending captures that build on it go with it.

Knows rows, states and keys. Does not know requests' sampling, the broker or time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.gpu_worker.engine.cache.entry import Capture, Entry, Hold, StoredState
from services.gpu_worker.engine.cache.evict import Candidate, choose
from services.gpu_worker.engine.cache.pages import BlockAllocator, IdPool
from services.gpu_worker.engine.cache.tree import PrefixTree
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.requests import Evicted, GenerateRequest, Hit, PoolCounts
from services.gpu_worker.engine.sequence import SequenceState
from shared.errors import EngineFault


class CaptureFailed(Exception):
    """A boundary could not be captured. Never fails a request; counted (C3, R-S6)."""


class States(Protocol):
    """What the manager asks of the recurrent states' pool."""

    def reset(self, slot: int) -> None: ...

    def take_snapshot(self, slot: int, snapshot: int) -> None: ...

    def restore(self, snapshot: int, slot: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """What a sequence starts from."""

    hit_key: bytes | None
    last_hidden: Tensor | None  #: of the row before the restored position; null when cold


class CacheManager:
    """All pools and the tree. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self, *, num_blocks: int, num_slots: int, num_snapshots: int, max_pending: int, states: States
    ) -> None:
        self.blocks = BlockAllocator(num_blocks)
        self.slots = IdPool(num_slots, "slot")
        self.snapshots = IdPool(num_snapshots, "snapshot")
        self.tree = PrefixTree()
        self.capture_failures = 0
        self._states = states
        self._max_pending = max_pending
        self._holds: dict[str, Hold] = {}
        self._pending: dict[int, Capture] = {}
        self._next_capture = 1

    # -- hits ---------------------------------------------------------------------------------------------------

    def lookup(
        self, request_id: str, root: bytes, tokens: Sequence[int], chain: Sequence[bytes]
    ) -> Hit | None:
        """The deepest published state that prefixes `tokens` and leaves at least one to compute.

        Takes references once a request id; the second call answers the same hit.
        """
        hold = self._holds.get(request_id)
        if hold is None:
            path = self.tree.match(root, tokens, chain)
            usable = [
                node
                for node in path
                if node.entry is not None and _restorable(node.entry) and node.position < len(tokens)
            ]
            if not usable:
                return None
            entry = usable[-1].entry
            assert entry is not None
            depth = entry.position // BLOCK_ROWS
            hold = Hold(
                entry=entry,
                tokens=list(tokens[: entry.position]),
                blocks=[node.block for node in path[:depth]],
            )
            self.blocks.retain(hold.blocks)
            entry.pins += 1
            self.tree.touch(entry)
            self._holds[request_id] = hold
        return Hit(key=hold.entry.key, position=hold.entry.position)

    def is_resident(self, key: bytes) -> bool:
        """Whether a lookup could restore the entry at `key`."""
        entry = self.tree.entry(key)
        return entry is not None and _restorable(entry)

    def drop_hit(self, request_id: str) -> bytes | None:
        """Give a hold back; answers its key, or null when there was none."""
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return None
        self.blocks.release(hold.blocks)
        hold.entry.pins -= 1
        return hold.entry.key

    def expect(self, request_id: str) -> None:
        """A choice was queued that will want the hold."""
        if request_id in self._holds:
            self._holds[request_id].waiting += 1

    def abandon(self, request_id: str) -> None:
        """A queued choice has restored the hold or will not come; the last one gives it back."""
        hold = self._holds.get(request_id)
        if hold is not None:
            hold.waiting -= 1
            if hold.waiting <= 0:
                self.drop_hit(request_id)

    # -- sequences ----------------------------------------------------------------------------------------------

    def fresh_blocks(self, request: GenerateRequest) -> int:
        """Blocks to allocate for prompt and whole budget beyond what the hold brings."""
        rows = len(request.tokens) + request.max_tokens
        return -(-rows // BLOCK_ROWS) - len(self._usable_hold_blocks(request))

    def admit(self, request: GenerateRequest, sequence: SequenceState) -> Admission | None:
        """Give a sequence its slot and blocks and restore its hit; null, and nothing taken, when they do not fit."""
        fresh = self.blocks.allocate(self.fresh_blocks(request))
        if fresh is None:
            return None
        slot = self.slots.acquire()
        if slot is None:
            self.blocks.release(fresh)
            return None
        sequence.block_table = fresh
        sequence.slot_idx = slot
        sequence.guard.add(lambda: self.slots.release(slot))
        sequence.guard.add(lambda: _release_table(self.blocks, sequence))
        self._states.reset(slot)
        return self._restore(request, sequence, slot)

    def _restore(self, request: GenerateRequest, sequence: SequenceState, slot: int) -> Admission:
        hold = self._holds.get(request.request_id)
        admission = Admission(hit_key=None, last_hidden=None)
        if hold is not None and request.use_cache:
            state = hold.entry.state
            if state is None:
                raise EngineFault("a held entry lost its state")
            self.blocks.retain(hold.blocks)
            sequence.apply_hit(hold.tokens, hold.blocks)
            self._states.restore(state.snapshot, slot)
            admission = Admission(hit_key=hold.entry.key, last_hidden=state.last_hidden)
        self.abandon(request.request_id)
        return admission

    def _usable_hold_blocks(self, request: GenerateRequest) -> list[int]:
        hold = self._holds.get(request.request_id)
        return hold.blocks if hold is not None and request.use_cache else []

    # -- captures -----------------------------------------------------------------------------------------------

    def boundaries(
        self, request: GenerateRequest, start: int, capture_at: int | None, ckpt_at: int
    ) -> list[int]:
        """Where a prime from `start` should capture: at most the branch point and the checkpoint, ascending.

        The branch point is the longest common prefix with anything in the tree; `capture_at` (what others know)
        counts only when the tree shows none.
        """
        prompt = len(request.tokens)
        path = self.tree.match(request.root, request.tokens, request.chain)
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
        if self.has_state(request, position):
            return None
        chain = request.chain[:depth]
        path = self.tree.match(request.root, request.tokens, chain)
        if self.tree.forks(path, depth):
            raise self._failed("the prefix forks where no entry is")
        if len(self._pending) >= self._max_pending:
            raise self._failed("too many captures wait for the broker")
        snapshot = self.snapshots.acquire()
        if snapshot is None:
            raise self._failed("no snapshot is free")
        self._states.take_snapshot(sequence.ssm_slot_idx(), snapshot)
        state = StoredState(snapshot=snapshot, last_hidden=last_hidden.clone())
        return self._settle(request, sequence, chain, state)

    def _settle(
        self, request: GenerateRequest, sequence: SequenceState, chain: Sequence[bytes], state: StoredState
    ) -> Capture:
        key = chain[-1]
        entry = self.tree.entry(key)
        fresh, splits = entry is None, None
        if entry is None:
            added = self.tree.grow(request.root, request.tokens, chain, sequence.block_table)
            self.blocks.retain(added)
            splits = None if added else self.tree.owner(key)
            entry = self.tree.place(key, splits)
        capture = Capture(
            capture_id=self._next_capture,
            request_id=request.request_id,
            entry=entry,
            fresh=fresh,
            parent=entry.parent,
            splits=splits,
            state=state,
            kv_blocks=entry.blocks if fresh else 0,
        )
        self._next_capture += 1
        self._pending[capture.capture_id] = capture
        return capture

    def publish(self, capture_id: int) -> bool:
        """Make a capture an entry that lookups find. False, with everything released, when it cannot stand."""
        capture = self._pending.get(capture_id)
        if capture is None:
            return False
        ground = [entry for entry in (capture.parent, capture.splits) if entry is not None]
        if capture.fresh and not all(entry.published for entry in ground):
            self._drop(capture)
            return False
        del self._pending[capture_id]
        capture.entry.published = True
        capture.entry.state = capture.state
        self.tree.touch(capture.entry)
        return True

    def discard(self, capture_id: int) -> None:
        """Release a capture and the pending ones that build on it. Unknown ids are ignored."""
        capture = self._pending.get(capture_id)
        if capture is not None:
            self._drop(capture)

    def _drop(self, capture: Capture) -> None:
        """Later captures that were charged on top of this one go first, the newest first, so that splits heal."""
        del self._pending[capture.capture_id]
        if capture.fresh:
            for other in sorted(self._pending.values(), key=lambda c: -c.capture_id):
                later = other.capture_id > capture.capture_id and other.fresh
                if (
                    later
                    and capture.entry in (other.parent, other.splits)
                    and other.capture_id in self._pending
                ):
                    self._drop(other)
            self.blocks.release(self.tree.unplace(capture.entry, capture.splits))
        self.snapshots.release(capture.state.snapshot)

    def has_state(self, request: GenerateRequest, position: int) -> bool:
        """Whether a state of this prompt stands at a boundary, granted or waiting for the broker."""
        entry = self.tree.entry(request.chain[position // BLOCK_ROWS - 1])
        if entry is None:
            return False
        return entry.state is not None or any(c.entry is entry for c in self._pending.values())

    def _failed(self, why: str) -> CaptureFailed:
        self.capture_failures += 1
        return CaptureFailed(why)

    # -- eviction -----------------------------------------------------------------------------------------------

    def candidates(self, blocks: int, snapshots: int) -> list[bytes]:
        """Keys whose eviction frees what is wanted, worst first. Takes nothing away."""
        found = [self._candidate(entry) for entry in self.tree.entries() if self._evictable(entry)]
        useful = [candidate for candidate in found if candidate.blocks or candidate.snapshots]
        return choose(useful, blocks=blocks, snapshots=snapshots, now=self.tree.tick)

    def evict(self, keys: Iterable[bytes]) -> Evicted:
        """Free entries: one without children goes with its rows, one with a child loses its state alone."""
        gone: list[bytes] = []
        stateless: list[bytes] = []
        blocks = snapshots = 0
        for key in keys:
            entry = self.tree.entry(key)
            if entry is None or not self._evictable(entry):
                continue
            snapshots += self._drop_state(entry)
            if entry.children:
                stateless.append(key)
                continue
            cursor: Entry | None = entry
            while cursor is not None and self._evictable(cursor) and not cursor.children and not cursor.state:
                blocks += self.blocks.release(self.tree.unplace(cursor, None))
                gone.append(cursor.key)
                cursor = cursor.parent
        return Evicted(gone=tuple(gone), stateless=tuple(stateless), blocks=blocks, snapshots=snapshots)

    def reclaimable(self) -> int:
        """Blocks that eviction could free now, one entry after another from the leaves down."""
        freed = 0
        busy: set[Entry] = set()
        for entry in sorted(self.tree.entries(), key=lambda e: -e.position):
            if entry in busy or not self._evictable(entry, children=None):
                if entry.parent is not None:
                    busy.add(entry.parent)
                continue
            freed += sum(1 for block in self.tree.span(entry) if self.blocks.refs(block) == 1)
        return freed

    def _evictable(self, entry: Entry, children: int | None = 1) -> bool:
        """Granted, not about to be restored, at most so many children, and no pending capture builds on it."""
        if not entry.published or entry.pins or (children is not None and entry.children > children):
            return False
        if any(
            entry in (capture.entry, capture.splits, capture.parent, capture.entry.parent)
            for capture in self._pending.values()
        ):
            return False
        return bool(entry.children) or not self._strands(entry)

    def _strands(self, entry: Entry) -> bool:
        """Whether rows below a leaf would stay for a pending capture alone, which the broker does not know yet.

        For the broker they go with the last child that it knows, so it would refund what is still kept.
        """
        below = entry.parent
        while below is not None and below.state is None:
            waiting = [c for c in self._pending.values() if c.fresh and c.entry.parent is below]
            if below.children - len(waiting) > 1:
                return False
            if waiting or any(c.entry is below for c in self._pending.values()):
                return True
            below = below.parent
        return False

    def _candidate(self, entry: Entry) -> Candidate:
        owned = 0
        if not entry.children:
            owned = sum(1 for block in self.tree.span(entry) if self.blocks.refs(block) == 1)
        below = entry.parent
        while below is not None and below.state is None:
            below = below.parent
        return Candidate(
            key=entry.key,
            used_at=entry.used_at,
            replay_tokens=entry.position - (below.position if below else 0),
            blocks=owned,
            snapshots=1 if entry.state is not None else 0,
        )

    def _drop_state(self, entry: Entry) -> int:
        if entry.state is None:
            return 0
        self.snapshots.release(entry.state.snapshot)
        entry.state = None
        return 1

    # -- accounts -----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Captures that wait for the broker."""
        return len(self._pending)

    def counts(self) -> tuple[PoolCounts, PoolCounts, PoolCounts]:
        """Blocks, slots, snapshots."""
        published = [entry for entry in self.tree.entries() if entry.published]
        cached_blocks = sum(entry.blocks for entry in published)
        cached_states = sum(1 for entry in published if entry.state is not None)
        held = self.blocks.total - self.blocks.free
        return (
            PoolCounts(
                total=self.blocks.total,
                free=self.blocks.free,
                owned=held - cached_blocks,
                cached=cached_blocks,
            ),
            PoolCounts(total=self.slots.total, free=self.slots.free, owned=self.slots.held, cached=0),
            PoolCounts(
                total=self.snapshots.total,
                free=self.snapshots.free,
                owned=self.snapshots.held - cached_states,
                cached=cached_states,
            ),
        )

    def check(self, sequences: Iterable[SequenceState]) -> None:
        """Recount every reference from its holders. Raises EngineFault on any difference."""
        self.blocks.check()
        sequences = list(sequences)
        expected: Counter[int] = Counter(self.tree.blocks())
        for hold in self._holds.values():
            expected.update(hold.blocks)
        for sequence in sequences:
            expected.update(sequence.block_table)
        wrong = [b for b in range(self.blocks.total) if self.blocks.refs(b) != expected[b]]
        if wrong:
            raise EngineFault(f"blocks {wrong} are not referenced as their holders say")
        owned = sum(entry.blocks for entry in self.tree.entries())
        if owned != len(self.tree):
            raise EngineFault(f"entries own {owned} blocks of a tree of {len(self.tree)}")
        states = sum(1 for entry in self.tree.entries() if entry.state is not None)
        if self.snapshots.held != states + len(self._pending) or self.slots.held != len(sequences):
            raise EngineFault("slots or snapshots are held by nobody")


def _restorable(entry: Entry) -> bool:
    return entry.published and entry.state is not None


def _release_table(blocks: BlockAllocator, sequence: SequenceState) -> None:
    blocks.release(sequence.block_table)
    sequence.block_table = []
