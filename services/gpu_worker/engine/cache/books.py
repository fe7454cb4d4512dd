"""The books of the pools: what each has, and whether every reference has a holder (C6). Reads everything, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from services.gpu_worker.engine.cache.decoded_pool import DecodedStates
from services.gpu_worker.engine.cache.entry import Capture, StoredState
from services.gpu_worker.engine.cache.holds import Holds
from services.gpu_worker.engine.cache.moves import Moves
from services.gpu_worker.engine.cache.pages import BlockAllocator, IdPool
from services.gpu_worker.engine.cache.tree import PrefixTree
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.stats import PoolCounts
from shared.errors import EngineFault


class Books:
    """Of one cache; all parts are seen live."""

    def __init__(
        self,
        blocks: BlockAllocator,
        slots: IdPool,
        snapshots: IdPool,
        tree: PrefixTree,
        *,
        moves: Moves,
        holds: Holds,
        pending: Mapping[int, Capture],
        decoded: DecodedStates,
    ) -> None:
        self._blocks = blocks
        self._slots = slots
        self._snapshots = snapshots
        self._tree = tree
        self._moves = moves
        self._holds = holds
        self._pending = pending
        self._decoded = decoded

    def counts(self) -> tuple[PoolCounts, PoolCounts, PoolCounts]:
        """Blocks, slots, snapshots."""
        published = [entry for entry in self._tree.entries() if entry.published]
        cached_blocks = sum(entry.blocks for entry in published) - self._tree.away
        cached_states = sum(1 for entry in published if entry.state is not None)
        if self._decoded.parked:
            parked = self._decoded.parked
            rows = {block for one in parked for block in one.blocks if isinstance(block, int)}
            cached_blocks += len(rows - set(self._tree.blocks()))
            cached_states += sum(1 for one in parked if isinstance(one.state, StoredState))
        held = self._blocks.total - self._blocks.free
        return (
            PoolCounts(
                total=self._blocks.total,
                free=self._blocks.free,
                owned=held - cached_blocks,
                cached=cached_blocks,
            ),
            PoolCounts(total=self._slots.total, free=self._slots.free, owned=self._slots.held, cached=0),
            PoolCounts(
                total=self._snapshots.total,
                free=self._snapshots.free,
                owned=self._snapshots.held - cached_states,
                cached=cached_states,
            ),
        )

    def check(self, sequences: Iterable[SequenceState]) -> None:
        """Recount every reference from its holders. Raises EngineFault on any difference."""
        self._blocks.check()
        self._moves.check(self._decoded.host_bytes)
        self._decoded.check()
        sequences = list(sequences)
        expected: Counter[int] = Counter(self._tree.blocks())
        for hold in self._holds:
            expected.update(hold.blocks)
        expected.update(self._decoded.blocks())
        for sequence in sequences:
            expected.update(sequence.block_table)
        wrong = [b for b in range(self._blocks.total) if self._blocks.refs(b) != expected[b]]
        if wrong:
            raise EngineFault(f"blocks {wrong} are not referenced as their holders say")
        owned = sum(entry.blocks for entry in self._tree.entries())
        if owned != len(self._tree):
            raise EngineFault(f"entries own {owned} blocks of a tree of {len(self._tree)}")
        states = sum(1 for entry in self._tree.entries() if entry.state is not None)
        kept = states + len(self._pending) + self._decoded.snapshots
        if self._snapshots.held != kept or self._slots.held != len(sequences):
            raise EngineFault("slots or snapshots are held by nobody")
