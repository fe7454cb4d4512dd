"""Gives room: spills idle entries to the host tier, names those that may be evicted, frees those that the broker let go.

`victims` knows what may go, `evict` in which order; this acts. Knows rows and states. Does not know who asks for room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from services.gpu_worker.engine.cache.entry import Entry
from services.gpu_worker.engine.cache.evict import Candidate, Policy, choose
from services.gpu_worker.engine.cache.moves import Moves
from services.gpu_worker.engine.cache.offload import HostTier
from services.gpu_worker.engine.cache.pages import BlockAllocator, IdPool
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.cache.tree import PrefixTree
from services.gpu_worker.engine.cache.victims import Victims
from services.gpu_worker.engine.stats import Evicted


class Eviction:
    """Of one tree and the pools under it."""

    def __init__(
        self,
        tree: PrefixTree,
        blocks: BlockAllocator,
        snapshots: IdPool,
        tier: HostTier,
        moves: Moves,
        victims: Victims,
        *,
        prices: Prices,
        policy: Policy,
    ) -> None:
        self.parked: Counter[bytes] = Counter()
        """Checkpoints of parked sessions, evicted after everything else."""
        self._tree = tree
        self._blocks = blocks
        self._snapshots = snapshots
        self._tier = tier
        self._moves = moves
        self._victims = victims
        self._prices = prices
        self._policy = policy

    def park(self, key: bytes) -> None:
        """A finished session waits at this entry: let it go last."""
        self.parked[key] += 1

    def unpark(self, key: bytes) -> None:
        """Take back one `park`."""
        self.parked[key] -= 1
        if not self.parked[key]:
            del self.parked[key]

    def make_room(self, blocks: int, snapshots: int) -> None:
        """Spill idle entries, worst first, until so much is free beyond what is, or the tier has no room left."""
        blocks, snapshots = self._blocks.free + blocks, self._snapshots.free + snapshots
        while self._tier.free > 0:
            short = (blocks - self._blocks.free, snapshots - self._snapshots.free)
            keys = self._choose(self._victims.to_spill(), *short)
            if not any([self._spill(key, rows=short[0] > 0) for key in keys]):
                return

    def spill(self, keys: Iterable[bytes]) -> int:
        """Move idle entries to the host tier now, as far as it has room; answers how many moved anything."""
        return sum(self._spill(key, rows=True) for key in keys)

    def _spill(self, key: bytes, *, rows: bool) -> bool:
        entry = self._tree.entry(key)
        if entry is None or not self._victims.idle(entry):
            return False
        return self._moves.spill_state(entry) + (self._moves.spill_rows(entry) if rows else 0) > 0

    def candidates(self, blocks: int, snapshots: int) -> list[bytes]:
        """Keys whose eviction frees what is wanted, worst first. Takes nothing away.

        Entries whose bytes were wrong always come first. With a host tier that is full it is copies there that go, so
        that `make_room` can follow; entries on the device only when no copy may go.
        """
        keys = self._victims.ruined()
        if self._tier.used and (blocks > 0 or snapshots > 0):
            wanted = self._prices.size(max(0, blocks), max(0, snapshots)) - self._tier.free
            dropped = [key for key in self._victims.to_drop(wanted) if key not in keys]
            if dropped or wanted <= 0:
                return keys + dropped
        return keys + [
            key for key in self._choose(self._victims.to_evict(), blocks, snapshots) if key not in keys
        ]

    def _choose(self, found: Sequence[Candidate], blocks: int, snapshots: int) -> list[bytes]:
        return choose(
            found, blocks=blocks, snapshots=snapshots, now=self._tree.tick, policy=self._parked_last
        )

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
            entry = self._tree.entry(key)
            if entry is None or not self._victims.evictable(entry):
                continue
            snapshots += self._moves.forget_state(entry)
            ruined.pop(key, None)
            if entry.children:
                stateless.append(key)
                continue
            cursor: Entry | None = entry
            while cursor is not None and self._goes_with_its_child(cursor):
                blocks += self._moves.forget_rows(self._tree.unplace(cursor, None))
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
