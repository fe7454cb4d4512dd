"""What could give room, and in which order. Answers; changes nothing.

An entry is *idle* when it is published, no hit is about to restore it and no waiting capture builds on it. Idle entries
may be spilled. They may be evicted if at most one entry stands on them, since a branch point serves many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.gpu_worker.engine.cache.entry import Capture, Entry
from services.gpu_worker.engine.cache.evict import Candidate
from services.gpu_worker.engine.cache.moves import Moves
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.cache.tree import PrefixTree


class Victims:
    """`pending` is the manager's, seen live."""

    def __init__(
        self, tree: PrefixTree, moves: Moves, pending: Mapping[int, Capture], prices: Prices
    ) -> None:
        self._tree = tree
        self._moves = moves
        self._pending = pending
        self._prices = prices

    def idle(self, entry: Entry) -> bool:
        """Granted, not about to be restored, and no pending capture builds on it."""
        if not entry.published or entry.pins:
            return False
        return not any(
            entry in (capture.entry, capture.splits, capture.parent, capture.entry.parent)
            for capture in self._pending.values()
        )

    def evictable(self, entry: Entry) -> bool:
        """Whether its state, or all of it if nothing stands on it, may go. A ruined state is gone already."""
        if not self.idle(entry) or (entry.children > 1 and entry.key not in self._moves.ruined):
            return False
        return bool(entry.children) or not self._strands(entry)

    def ruined(self) -> list[bytes]:
        """Entries to withdraw because their bytes were wrong, leaves first."""
        entries = [entry for entry in map(self._tree.entry, self._moves.ruined) if entry is not None]
        entries.sort(key=lambda entry: (-entry.position, entry.key))
        return [entry.key for entry in entries if self.evictable(entry)]

    def to_evict(self) -> list[Candidate]:
        """Entries whose going frees something on the device."""
        return self._useful(
            self._candidate(entry, rows=not entry.children)
            for entry in self._tree.entries()
            if self.evictable(entry)
        )

    def to_spill(self) -> list[Candidate]:
        """Entries that could go to the host. Rows go from the leaves down: not below rows that a hit would need here."""
        entries = list(self._tree.entries())
        carrying = {entry.parent for entry in entries if self._moves.on_device(entry)}
        return self._useful(
            self._candidate(entry, rows=entry not in carrying) for entry in entries if self.idle(entry)
        )

    def to_drop(self, size: int) -> list[bytes]:
        """Entries whose going frees so many bytes of the host tier, as far as they reach; the least recent first."""
        keys = []
        for entry in sorted(self._tree.entries(), key=lambda entry: (entry.used_at, entry.key)):
            if size <= 0:
                break
            held = self._moves.host_bytes(entry) if not entry.children else _state_bytes(entry)
            if held and self.evictable(entry):
                keys.append(entry.key)
                size -= held
        return keys

    def reclaimable(self) -> int:
        """Blocks that eviction could free now, one entry after another from the leaves down."""
        freed = 0
        busy: set[Entry] = set()
        for entry in sorted(self._tree.entries(), key=lambda e: -e.position):
            if entry in busy or not self.idle(entry) or (not entry.children and self._strands(entry)):
                if entry.parent is not None:
                    busy.add(entry.parent)
                continue
            freed += self._moves.spillable_rows(entry)
        return freed

    def _strands(self, entry: Entry) -> bool:
        """Whether rows below a leaf would stay for a pending capture alone, which the broker does not know yet.

        For the broker they go with the last child that it knows, so it would refund what is still kept.
        """
        below = entry.parent
        while below is not None and not below.kept:
            waiting = [c for c in self._pending.values() if c.fresh and c.entry.parent is below]
            if below.children - len(waiting) > 1:
                return False
            if waiting or any(c.entry is below for c in self._pending.values()):
                return True
            below = below.parent
        return False

    def _candidate(self, entry: Entry, *, rows: bool) -> Candidate:
        blocks = self._moves.spillable_rows(entry) if rows else 0
        states = int(entry.state is not None)
        below = entry.parent
        while below is not None and not below.kept:
            below = below.parent
        start = below.position if below else 0
        return Candidate(
            key=entry.key,
            used_at=entry.used_at,
            replay_tokens=entry.position - start,
            blocks=blocks,
            snapshots=states,
            flops_per_byte=self._prices.flops_per_byte(
                start=start, stop=entry.position, blocks=blocks, states=states
            ),
        )

    @staticmethod
    def _useful(found: Iterable[Candidate]) -> list[Candidate]:
        return [candidate for candidate in found if candidate.blocks or candidate.snapshots]


def _state_bytes(entry: Entry) -> int:
    return entry.host.size if entry.host is not None else 0
