"""The cache's one owner: hands out blocks, slots and snapshots, and keeps the prefix tree.

    lookup ─> hold ──bring_back──> on the device ──admit──> sequence (own references, state restored) ──end──> guard
    prime reaches a boundary ──capture──> pending ──publish──> entry ──evict──> free
                                              └──discard──> free └─make_room─> host tier

The parts know one thing each (`holds`, `captures`, `moves`, `victims`); this is the face that the engine sees.
Knows rows, states and keys. Does not know requests' sampling, the broker or time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.gpu_worker.engine.cache.captures import Captures, Snapshots
from services.gpu_worker.engine.cache.decoded import DecodedState, DecodedStates
from services.gpu_worker.engine.cache.entry import Capture, Entry, StoredState
from services.gpu_worker.engine.cache.evict import Candidate, Policy, choose, worst_first
from services.gpu_worker.engine.cache.holds import Holds
from services.gpu_worker.engine.cache.moves import Moves
from services.gpu_worker.engine.cache.offload import HostTier
from services.gpu_worker.engine.cache.pages import BlockAllocator, IdPool
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.cache.tree import PrefixTree
from services.gpu_worker.engine.cache.victims import Victims
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.requests import GenerateRequest, Hit
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.stats import Evicted, PoolCounts
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
        max_decoded: int = 0,
    ) -> None:
        """`max_decoded` = decode-made states kept beside the tree, at most a quarter of the snapshots."""
        self.blocks = BlockAllocator(num_blocks)
        self.slots = IdPool(num_slots, "slot")
        self.snapshots = IdPool(num_snapshots, "snapshot")
        self.tree = PrefixTree()
        self.tier = tier
        self.parked: Counter[bytes] = Counter()
        """Checkpoints of parked sessions, evicted after everything else."""
        self._generations = itertools.count(1)
        self._states = states
        self._prices = prices
        self._policy = policy
        self._moves = Moves(self.tree, self.blocks, self.snapshots, tier)
        self._held = Holds(self.tree, self.blocks, self._moves)
        self._captures = Captures(
            self.tree, self.blocks, self.snapshots, self._moves, states, max_pending=max_pending
        )
        self._pending = self._captures.pending
        self.decoded = DecodedStates(
            self.blocks, self.snapshots, states, tier, most=min(max_decoded, num_snapshots // 4)
        )
        self._victims = Victims(self.tree, self._moves, self._pending, prices)

    # -- hits ---------------------------------------------------------------------------------------------------

    def lookup(
        self, request_id: str, root: bytes, tokens: Sequence[int], chain: Sequence[bytes]
    ) -> Hit | None:
        """See `Holds.lookup`."""
        return self._held.lookup(request_id, root, tokens, chain)

    def holds(self, request_id: str) -> bool:
        """Whether a request has a hit."""
        return request_id in self._held

    def drop_hit(self, request_id: str) -> bytes | None:
        """See `Holds.drop`."""
        return self._held.drop(request_id)

    def deepen(self, request: GenerateRequest) -> None:
        """See `Holds.deepen`."""
        self._held.deepen(request)

    def expect(self, request_id: str) -> None:
        """See `Holds.expect`."""
        self._held.expect(request_id)

    def abandon(self, request_id: str) -> None:
        """See `Holds.abandon`."""
        self._held.abandon(request_id)

    def bring_back(self, request_id: str) -> bytes | None:
        """See `Holds.bring`; a snapshot is made free for it."""
        if self._held.needs_snapshot(request_id) and not self.snapshots.free:
            self.make_room(0, 1)
            self._demand_snapshot()
        return self._held.bring(request_id)

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

    # -- sequences ----------------------------------------------------------------------------------------------

    def base(self, request: GenerateRequest, checkpoint: DecodedState | None) -> DecodedState | None:
        """What a sequence goes on from instead of its hit: the stream's own checkpoint, or else, if it opted in, the
        longest parked session that is deeper than the hit."""
        if checkpoint is not None and checkpoint.alive:
            return checkpoint
        if request.reuse != "decode" or not request.use_cache:
            return None
        hold = self._held.usable(request)
        found = self.decoded.find(request.root, request.tokens)
        return found if found and found.position > (hold.entry.position if hold else 0) else None

    def bring_base(self, decoded: DecodedState) -> bool:
        """See `DecodedStates.bring`; a snapshot is made free for it."""
        if decoded.on_device:
            return True
        self._demand_snapshot(but=decoded)
        return self.decoded.bring(decoded)

    def _demand_snapshot(self, but: DecodedState | None = None) -> None:
        if not self.snapshots.free:
            self.decoded.free_snapshot(but)

    def fresh_blocks(
        self, request: GenerateRequest, rows: int | None = None, base: DecodedState | None = None
    ) -> int:
        """Blocks to allocate for `rows` (null = prompt and whole budget) beyond what `base` or else the hold brings."""
        rows = len(request.tokens) + request.max_tokens if rows is None else rows
        if base is not None:
            return -(-max(rows, base.position + 1) // BLOCK_ROWS) - base.shared
        hold = self._held.usable(request)
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
        fresh = self.blocks.allocate(self.fresh_blocks(request, rows, base))
        if fresh is None:
            return None
        slot = self.slots.acquire()
        if slot is None:
            self.blocks.release(fresh)
            return None
        sequence.mtp_store_gen = next(self._generations)
        sequence.block_table = fresh
        sequence.slot_idx = slot
        sequence.guard.add(lambda: self.slots.release(slot))
        sequence.guard.add(lambda: _release_table(self.blocks, sequence))
        self._states.reset(slot)
        if base is not None:
            self.abandon(request.request_id)
            return Admission(hit_key=None, last_hidden=self.decoded.restore(base, sequence))
        return self._restore(request, sequence, slot)

    def grow(self, sequence: SequenceState, rows: int) -> bool:
        """Give a running sequence room for `rows` more, as far as there are free blocks. True when it has any."""
        short = -(-(sequence.seq_len + rows) // BLOCK_ROWS) - len(sequence.block_table)
        if short > 0:
            sequence.block_table.extend(self.blocks.allocate(min(short, self.blocks.free)) or ())
        return sequence.rows_left > 0

    def _restore(self, request: GenerateRequest, sequence: SequenceState, slot: int) -> Admission:
        hold = self._held.usable(request)
        admission = Admission(hit_key=None, last_hidden=None)
        if hold is not None:
            state = hold.entry.state
            if state is None:
                raise EngineFault("a held entry lost its state")
            self.blocks.retain(hold.blocks)
            sequence.apply_hit(hold.tokens, hold.blocks)
            self._states.restore(state.snapshot, slot)
            if hold.entry.position == len(request.tokens):
                sequence.marconi_exact_snap = state.snapshot
            admission = Admission(hit_key=hold.entry.key, last_hidden=state.last_hidden)
        self.abandon(request.request_id)
        return admission

    # -- captures -----------------------------------------------------------------------------------------------

    def boundaries(
        self, request: GenerateRequest, start: int, capture_at: int | None, ckpt_at: int
    ) -> list[int]:
        """See `Captures.boundaries`."""
        return self._captures.boundaries(request, start, capture_at, ckpt_at)

    def capture(
        self, request: GenerateRequest, sequence: SequenceState, position: int, last_hidden: Tensor
    ) -> Capture | None:
        """See `Captures.capture`; a snapshot that waits for nobody but its own stream gives way to it."""
        self._demand_snapshot()
        return self._captures.capture(request, sequence, position, last_hidden)

    def publish(self, capture_id: int) -> bool:
        """See `Captures.publish`."""
        return self._captures.publish(capture_id)

    def discard(self, capture_id: int) -> None:
        """See `Captures.discard`."""
        self._captures.discard(capture_id)

    def has_state(self, request: GenerateRequest, position: int) -> bool:
        """See `Captures.has_state`."""
        return self._captures.has_state(request, position)

    @property
    def capture_failures(self) -> int:
        """Boundaries that could not be captured, ever."""
        return self._captures.failures

    # -- eviction -----------------------------------------------------------------------------------------------

    def give_up_decoded(self, blocks: int, but: DecodedState | None = None) -> bool:
        """Blocks are needed that no eviction could free: decode-made states that nobody runs on give theirs. True when
        any came free. `but` = what the one that needs them goes on from."""
        short = blocks - self.reclaimable()
        return short > 0 and self.decoded.free_blocks(short, but)

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
        if self.decoded.parked:
            parked = self.decoded.parked
            rows = {block for one in parked for block in one.blocks if isinstance(block, int)}
            cached_blocks += len(rows - set(self.tree.blocks()))
            cached_states += sum(1 for one in parked if isinstance(one.state, StoredState))
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
        self._moves.check(self.decoded.host_bytes)
        self.decoded.check()
        sequences = list(sequences)
        expected: Counter[int] = Counter(self.tree.blocks())
        for hold in self._held:
            expected.update(hold.blocks)
        expected.update(self.decoded.blocks())
        for sequence in sequences:
            expected.update(sequence.block_table)
        wrong = [b for b in range(self.blocks.total) if self.blocks.refs(b) != expected[b]]
        if wrong:
            raise EngineFault(f"blocks {wrong} are not referenced as their holders say")
        owned = sum(entry.blocks for entry in self.tree.entries())
        if owned != len(self.tree):
            raise EngineFault(f"entries own {owned} blocks of a tree of {len(self.tree)}")
        states = sum(1 for entry in self.tree.entries() if entry.state is not None)
        kept = states + len(self._pending) + self.decoded.snapshots
        if self.snapshots.held != kept or self.slots.held != len(sequences):
            raise EngineFault("slots or snapshots are held by nobody")


def _release_table(blocks: BlockAllocator, sequence: SequenceState) -> None:
    blocks.release(sequence.block_table)
    sequence.block_table = []
