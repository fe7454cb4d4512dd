"""The cache's one owner: hands out blocks, slots and snapshots, and keeps the prefix tree.

    lookup ─> hold ──bring_back──> on the device ──admit──> sequence (own references, state restored) ──end──> guard
    prime reaches a boundary ──capture──> pending ──publish──> entry ──evict──> free
                                              └──discard──> free └─make_room─> host tier

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
from services.gpu_worker.engine.cache.evict import Candidate, Policy, choose, worst_first
from services.gpu_worker.engine.cache.moves import Moves
from services.gpu_worker.engine.cache.offload import HostTier
from services.gpu_worker.engine.cache.pages import BlockAllocator, IdPool
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.cache.tree import Node, PrefixTree
from services.gpu_worker.engine.cache.victims import Victims
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
        self,
        *,
        num_blocks: int,
        num_slots: int,
        num_snapshots: int,
        max_pending: int,
        states: States,
        tier: HostTier,
        prices: Prices,
        policy: Policy = worst_first,
    ) -> None:
        self.blocks = BlockAllocator(num_blocks)
        self.slots = IdPool(num_slots, "slot")
        self.snapshots = IdPool(num_snapshots, "snapshot")
        self.tree = PrefixTree()
        self.tier = tier
        self.capture_failures = 0
        self.parked: Counter[bytes] = Counter()
        """Checkpoints of parked sessions, evicted after everything else."""
        self._states = states
        self._max_pending = max_pending
        self._holds: dict[str, Hold] = {}
        self._pending: dict[int, Capture] = {}
        self._next_capture = 1
        self._prices = prices
        self._policy = policy
        self._moves = Moves(self.tree, self.blocks, self.snapshots, tier)
        self._victims = Victims(self.tree, self._moves, self._pending, prices)

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
            entry = _deepest(path, len(tokens))
            if entry is None:
                return None
            rows = path[: entry.position // BLOCK_ROWS]
            hold = Hold(
                entry=entry,
                tokens=list(tokens[: entry.position]),
                blocks=[node.block for node in rows if node.block is not None],
            )
            self.blocks.retain(hold.blocks)
            entry.pins += 1
            self.tree.touch(entry)
            self._holds[request_id] = hold
        return Hit(key=hold.entry.key, position=hold.entry.position)

    def holds(self, request_id: str) -> bool:
        """Whether a request has a hit."""
        return request_id in self._holds

    def is_resident(self, key: bytes) -> bool:
        """Whether a lookup could restore the entry at `key`."""
        entry = self.tree.entry(key)
        return entry is not None and entry.published and self._moves.is_whole(entry)

    def park(self, key: bytes) -> None:
        """A finished session waits at this entry: let it go last."""
        self.parked[key] += 1

    def unpark(self, key: bytes) -> None:
        """Take back one `park`."""
        self.parked[key] -= 1
        if not self.parked[key]:
            del self.parked[key]

    def drop_hit(self, request_id: str) -> bytes | None:
        """Give a hold back; answers its key, or null when there was none."""
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return None
        self.blocks.release(hold.blocks)
        hold.entry.pins -= 1
        return hold.entry.key

    def bring_back(self, request_id: str) -> bytes | None:
        """Bring what a request's hit needs from the host tier to the device, checked, before anybody reads it.

        Null when the hit stands, or there is none. Otherwise it is a miss (C3): answers the key, and the hold is gone.
        Room for the rows must be free: `fresh_blocks` counts them.
        """
        hold = self._holds.get(request_id)
        if hold is None or (hold.entry.state and len(hold.blocks) * BLOCK_ROWS == hold.entry.position):
            return None
        if hold.entry.host is not None and not self.snapshots.free:
            self.make_room(0, 1)
        if not self._moves.is_whole(hold.entry) or not self._moves.bring(hold.entry):
            return self.drop_hit(request_id)
        rows = [node.block for node in self.tree.path(hold.entry.key) if node.block is not None]
        self.blocks.retain(set(rows) - set(hold.blocks))
        hold.blocks = rows
        return None

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
        self._moves.adopt(self.tree.match(request.root, request.tokens, chain), sequence.block_table)
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
        self._moves.ruined.pop(capture.entry.key, None)
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
            self._moves.forget_rows(self.tree.unplace(capture.entry, capture.splits))
        self.snapshots.release(capture.state.snapshot)

    def has_state(self, request: GenerateRequest, position: int) -> bool:
        """Whether a state of this prompt stands at a boundary, granted or waiting for the broker."""
        entry = self.tree.entry(request.chain[position // BLOCK_ROWS - 1])
        if entry is None:
            return False
        return entry.kept or any(c.entry is entry for c in self._pending.values())

    def _failed(self, why: str) -> CaptureFailed:
        self.capture_failures += 1
        return CaptureFailed(why)

    # -- eviction -----------------------------------------------------------------------------------------------

    def make_room(self, blocks: int, snapshots: int) -> None:
        """Spill idle entries, worst first, until so much is free beyond what is, or the tier has no room left."""
        blocks, snapshots = self.blocks.free + blocks, self.snapshots.free + snapshots
        while self.tier.free > 0:
            short = (blocks - self.blocks.free, snapshots - self.snapshots.free)
            keys = self._choose(self._victims.to_spill(), *short)
            if not any([self._spill(key, rows=short[0] > 0) for key in keys]):
                return

    def spill(self, keys: Iterable[bytes]) -> int:
        """Move idle entries to the host tier now, as far as it has room; answers how many moved anything."""
        return sum(self._spill(key, rows=True) for key in keys)

    def _spill(self, key: bytes, *, rows: bool) -> bool:
        entry = self.tree.entry(key)
        if entry is None or not self._victims.idle(entry):
            return False
        return self._moves.spill_state(entry) + (self._moves.spill_rows(entry) if rows else 0) > 0

    def candidates(self, blocks: int, snapshots: int) -> list[bytes]:
        """Keys whose eviction frees what is wanted, worst first. Takes nothing away.

        Entries whose bytes were wrong always come first. With a host tier that is full it is copies there that go, so
        that `make_room` can follow; entries on the device only when no copy may go.
        """
        keys = self._victims.ruined()
        if self.tier.used and (blocks > 0 or snapshots > 0):
            wanted = self._prices.size(max(0, blocks), max(0, snapshots)) - self.tier.free
            dropped = [key for key in self._victims.to_drop(wanted) if key not in keys]
            if dropped or wanted <= 0:
                return keys + dropped
        return keys + [
            key for key in self._choose(self._victims.to_evict(), blocks, snapshots) if key not in keys
        ]

    def _choose(self, found: Sequence[Candidate], blocks: int, snapshots: int) -> list[bytes]:
        return choose(found, blocks=blocks, snapshots=snapshots, now=self.tree.tick, policy=self._parked_last)

    def _parked_last(self, found: Sequence[Candidate], now: int) -> list[Candidate]:
        """The policy's order, what finished sessions wait at behind the rest."""
        return sorted(self._policy(found, now), key=lambda candidate: candidate.key in self.parked)

    def evict(self, keys: Iterable[bytes]) -> Evicted:
        """Free entries: one without children goes with its rows, one with a child loses its state alone."""
        gone: list[bytes] = []
        stateless: list[bytes] = []
        blocks = snapshots = 0
        ruined = self._moves.ruined
        for key in keys:
            entry = self.tree.entry(key)
            if entry is None or not self._victims.evictable(entry):
                continue
            snapshots += self._moves.forget_state(entry)
            ruined.pop(key, None)
            if entry.children:
                stateless.append(key)
                continue
            cursor: Entry | None = entry
            while cursor is not None and self._goes_with_its_child(cursor):
                blocks += self._moves.forget_rows(self.tree.unplace(cursor, None))
                gone.append(cursor.key)
                cursor = cursor.parent
        return Evicted(gone=tuple(gone), stateless=tuple(stateless), blocks=blocks, snapshots=snapshots)

    def _goes_with_its_child(self, entry: Entry) -> bool:
        """Nothing stands on it any more and its state went before; a ruined one has to be withdrawn first."""
        idle = self._victims.evictable(entry) and entry.key not in self._moves.ruined
        return idle and not entry.children and not entry.kept

    def reclaimable(self) -> int:
        """Blocks that eviction could free now, one entry after another from the leaves down."""
        return self._victims.reclaimable()

    @property
    def ruined(self) -> int:
        """Entries that wait to be withdrawn because their bytes were wrong."""
        return len(self._victims.ruined()) if self._moves.ruined else 0

    # -- accounts -----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Captures that wait for the broker."""
        return len(self._pending)

    def counts(self) -> tuple[PoolCounts, PoolCounts, PoolCounts]:
        """Blocks, slots, snapshots."""
        published = [entry for entry in self.tree.entries() if entry.published]
        cached_blocks = sum(entry.blocks for entry in published) - self.tree.away
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
        self._moves.check()
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


def _deepest(path: Iterable[Node], prompt: int) -> Entry | None:
    """The deepest entry of a matched path that a prompt of so many tokens can restore: state and all rows exist."""
    best = None
    for node in path:
        if not node.there or node.position >= prompt:
            break
        if node.entry is not None and node.entry.published and node.entry.kept:
            best = node.entry
    return best


def _release_table(blocks: BlockAllocator, sequence: SequenceState) -> None:
    blocks.release(sequence.block_table)
    sequence.block_table = []
