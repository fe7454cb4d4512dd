"""The cache's one owner: hands out blocks, slots and snapshots, and keeps the prefix tree.

    lookup ─> hold ──bring_back──> on the device ──admit──> sequence (own references, state restored) ──end──> guard
    prime reaches a boundary ──capture──> pending ──publish──> entry ──evict──> free
                                              └──discard──> free └─make_room─> host tier

The parts know one thing each (`holds`, `admissions`, `captures`, `decoded`, `moves`, `eviction`, `books`); this is the
face that the engine sees.
Knows rows, states and keys. Does not know requests' sampling, the broker or time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from services.gpu_worker.engine.cache.admissions import Admission, Admissions, States
from services.gpu_worker.engine.cache.books import Books
from services.gpu_worker.engine.cache.captures import Captures
from services.gpu_worker.engine.cache.decoded import DecodedState
from services.gpu_worker.engine.cache.decoded_pool import DecodedStates
from services.gpu_worker.engine.cache.entry import Capture
from services.gpu_worker.engine.cache.evict import Policy, worst_first
from services.gpu_worker.engine.cache.eviction import Eviction
from services.gpu_worker.engine.cache.holds import Holds
from services.gpu_worker.engine.cache.moves import Moves
from services.gpu_worker.engine.cache.offload import HostTier
from services.gpu_worker.engine.cache.pages import BlockAllocator, IdPool
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.cache.tree import PrefixTree
from services.gpu_worker.engine.cache.victims import Victims
from services.gpu_worker.engine.requests import GenerateRequest, Hit
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.stats import Evicted, PoolCounts


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
        self._moves = Moves(self.tree, self.blocks, self.snapshots, tier)
        self._held = Holds(self.tree, self.blocks, self._moves)
        self._captures = Captures(
            self.tree, self.blocks, self.snapshots, self._moves, states, max_pending=max_pending
        )
        self.decoded = DecodedStates(
            self.blocks, self.snapshots, states, tier, most=min(max_decoded, num_snapshots // 4)
        )
        self._admissions = Admissions(self.blocks, self.slots, states, holds=self._held, decoded=self.decoded)
        self._eviction = Eviction(
            self.tree,
            self.blocks,
            self.snapshots,
            tier,
            self._moves,
            Victims(self.tree, self._moves, self._captures.pending, prices),
            prices=prices,
            policy=policy,
        )
        self._books = Books(
            self.blocks,
            self.slots,
            self.snapshots,
            self.tree,
            moves=self._moves,
            holds=self._held,
            pending=self._captures.pending,
            decoded=self.decoded,
        )

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

    # -- sequences ----------------------------------------------------------------------------------------------

    def bring_base(self, decoded: DecodedState) -> bool:
        """See `DecodedStates.bring`; a snapshot is made free for it."""
        if decoded.on_device:
            return True
        self._demand_snapshot(but=decoded)
        return self.decoded.bring(decoded)

    def _demand_snapshot(self, but: DecodedState | None = None) -> None:
        if not self.snapshots.free:
            self.decoded.free_snapshot(but)

    def base(self, request: GenerateRequest, checkpoint: DecodedState | None) -> DecodedState | None:
        """See `Admissions.base`."""
        return self._admissions.base(request, checkpoint)

    def fresh_blocks(
        self, request: GenerateRequest, rows: int | None = None, base: DecodedState | None = None
    ) -> int:
        """See `Admissions.fresh_blocks`."""
        return self._admissions.fresh_blocks(request, rows, base)

    def admit(
        self,
        request: GenerateRequest,
        sequence: SequenceState,
        rows: int | None = None,
        base: DecodedState | None = None,
    ) -> Admission | None:
        """See `Admissions.admit`."""
        return self._admissions.admit(request, sequence, rows, base)

    def grow(self, sequence: SequenceState, rows: int) -> bool:
        """See `Admissions.grow`."""
        return self._admissions.grow(sequence, rows)

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
        """See `Eviction.make_room`."""
        self._eviction.make_room(blocks, snapshots)

    def spill(self, keys: Iterable[bytes]) -> int:
        """See `Eviction.spill`."""
        return self._eviction.spill(keys)

    def candidates(self, blocks: int, snapshots: int) -> list[bytes]:
        """See `Eviction.candidates`."""
        return self._eviction.candidates(blocks, snapshots)

    def evict(self, keys: Iterable[bytes]) -> Evicted:
        """See `Eviction.evict`."""
        return self._eviction.evict(keys)

    def reclaimable(self) -> int:
        """See `Eviction.reclaimable`."""
        return self._eviction.reclaimable()

    @property
    def ruined(self) -> int:
        """Entries that wait to be withdrawn because their bytes were wrong."""
        return self._eviction.ruined

    @property
    def parked(self) -> Counter[bytes]:
        """Checkpoints that finished sessions wait at."""
        return self._eviction.parked

    def park(self, key: bytes) -> None:
        """See `Eviction.park`."""
        self._eviction.park(key)

    def unpark(self, key: bytes) -> None:
        """See `Eviction.unpark`."""
        self._eviction.unpark(key)

    # -- accounts -----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Captures that wait for the broker."""
        return len(self._captures.pending)

    def counts(self) -> tuple[PoolCounts, PoolCounts, PoolCounts]:
        """Blocks, slots, snapshots."""
        return self._books.counts()

    def check(self, sequences: Iterable[SequenceState]) -> None:
        """See `Books.check`."""
        self._books.check(sequences)
