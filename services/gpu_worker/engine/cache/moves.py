"""Moves rows and states of entries between the device and the host tier. Where they are is all that changes: who owns
what, and what the broker charges, stay as they are.

    on the device ──spill──> on the host ──bring──> on the device
          ^                       │ └── wrong bytes ──> lost: the entry is *ruined*, and waits for its withdrawal
          └──adopt (a sequence computed the rows again)

Knows the tree, the pools' counts and the tier. Does not know requests, nor why something moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.gpu_worker.engine.cache.entry import Entry, StoredState
from services.gpu_worker.engine.cache.offload import HostTier
from services.gpu_worker.engine.cache.pages import BlockAllocator, IdPool
from services.gpu_worker.engine.cache.tree import Node, PrefixTree
from shared.errors import EngineFault


class Moves:
    """`ruined` = keys of entries whose state is gone though the broker was not asked, in the order of their loss."""

    def __init__(self, tree: PrefixTree, blocks: BlockAllocator, snapshots: IdPool, tier: HostTier) -> None:
        self.ruined: dict[bytes, None] = {}
        self.tier = tier
        self._tree = tree
        self._blocks = blocks
        self._snapshots = snapshots

    # -- to the host --------------------------------------------------------------------------------------------

    def spill_state(self, entry: Entry) -> int:
        """Snapshots freed: 1, or 0 when there was none here or no room there."""
        if entry.state is None:
            return 0
        entry.host = self.tier.take_state(entry.state.snapshot, entry.state.last_hidden)
        return self._forget_snapshot(entry) if entry.host is not None else 0

    def spill_rows(self, entry: Entry) -> int:
        """Blocks freed, from the deepest row down, as far as the room goes. Rows that somebody reads stay."""
        freed = 0
        for node in self._tree.span(entry):
            if node.block is None or self._blocks.refs(node.block) > 1:
                continue
            node.host = self.tier.take_block(node.block)
            if node.host is None:
                break
            freed += self._blocks.release([node.block])
            node.block = None
            self._tree.away += 1
        return freed

    def spillable_rows(self, entry: Entry) -> int:
        """Blocks that `spill_rows` would free, given the room."""
        blocks = [node.block for node in self._tree.span(entry) if node.block is not None]
        return sum(1 for block in blocks if self._blocks.refs(block) == 1)

    def on_device(self, entry: Entry) -> bool:
        """Whether anything of the entry is on the device."""
        return entry.state is not None or any(node.block is not None for node in self._tree.span(entry))

    def host_bytes(self, entry: Entry) -> int:
        """Bytes that the tier holds of an entry."""
        state = entry.host.size if entry.host is not None else 0
        return state + sum(node.host.size for node in self._tree.span(entry) if node.host is not None)

    # -- to the device ------------------------------------------------------------------------------------------

    def is_whole(self, entry: Entry) -> bool:
        """Whether the state and every row below it exist somewhere."""
        return entry.kept and all(node.there for node in self._tree.path(entry.key))

    def bring(self, entry: Entry) -> bool:
        """Bring the state and all rows below it to the device; the new blocks are referenced once, by the tree.

        False, with nothing moved, when no snapshot is free or when bytes are wrong, which ruins what they belong to.
        Raises EngineFault when there are too few free blocks.
        """
        missing = [node for node in self._tree.path(entry.key) if node.block is None]
        snapshot = self._snapshots.acquire() if entry.host is not None else None
        if entry.host is not None and snapshot is None:
            return False
        blocks = self._blocks.allocate(len(missing))
        if blocks is None:
            raise EngineFault("a planned restore did not fit")
        state = self._arrived(entry, missing, blocks, snapshot)
        if state is None:
            self._blocks.release(blocks)
            if snapshot is not None:
                self._snapshots.release(snapshot)
            return False
        self._drop_host_state(entry)
        entry.state = state
        for node, block in zip(missing, blocks, strict=True):
            self._settle(node, block)
        return True

    def _arrived(
        self, entry: Entry, missing: Sequence[Node], blocks: Sequence[int], snapshot: int | None
    ) -> StoredState | None:
        """Copy all, then say whether all of it is right."""
        state = entry.state
        if entry.host is not None and snapshot is not None:
            hidden = self.tier.bring_state(entry.host, snapshot)
            if hidden is None:
                self._ruin(entry)
                return None
            state = StoredState(snapshot=snapshot, last_hidden=hidden)
        copies = [node.host for node in missing if node.host is not None]
        if len(copies) < len(missing):
            self._lose(next(node for node in missing if node.host is None))
            return None
        arrived = self.tier.bring_blocks(copies, blocks)
        wrong = [node for node, good in zip(missing, arrived, strict=True) if not good]
        if wrong:
            self._lose(wrong[0])
            return None
        return state

    def adopt(self, nodes: Sequence[Node], table: Sequence[int]) -> None:
        """A sequence holds the rows of these nodes: nodes that are not on the device share its blocks."""
        for node, block in zip(nodes, table, strict=False):
            if node.block is None:
                self._blocks.retain([block])
                self._settle(node, block)

    def _settle(self, node: Node, block: int) -> None:
        self._drop_host_rows(node)
        node.block = block
        self._tree.away -= 1

    # -- gone ---------------------------------------------------------------------------------------------------

    def forget_state(self, entry: Entry) -> int:
        """Drop a state wherever it is; answers the snapshots freed."""
        self._drop_host_state(entry)
        return self._forget_snapshot(entry) if entry.state is not None else 0

    def forget_rows(self, nodes: Sequence[Node]) -> int:
        """Nodes left the tree: give their rows back; answers the blocks freed."""
        for node in nodes:
            self._drop_host_rows(node)
            self._tree.away -= node.block is None
        return self._blocks.release([node.block for node in nodes if node.block is not None])

    def _lose(self, node: Node) -> None:
        """The rows of a node are wrong: no entry at or above it can be restored."""
        self._drop_host_rows(node)
        for entry in _entries_above(node):
            self._ruin(entry)

    def _ruin(self, entry: Entry) -> None:
        """Drop a published entry's state; the broker still has to be asked for the entry."""
        if entry.published and entry.kept:
            self.forget_state(entry)
            self.ruined[entry.key] = None

    def _forget_snapshot(self, entry: Entry) -> int:
        assert entry.state is not None
        self._snapshots.release(entry.state.snapshot)
        entry.state = None
        return 1

    def _drop_host_state(self, entry: Entry) -> None:
        if entry.host is not None:
            self.tier.drop(entry.host)
            entry.host = None

    def _drop_host_rows(self, node: Node) -> None:
        if node.host is not None:
            self.tier.drop(node.host)
            node.host = None

    # -- accounts -----------------------------------------------------------------------------------------------

    def check(self, others: int = 0) -> None:
        """Recount the tier's bytes, of which `others` are not the tree's, and the rows that are away. Raises EngineFault
        on a difference."""
        nodes, entries = list(self._tree.nodes()), list(self._tree.entries())
        copies = [node.host for node in nodes if node.host is not None]
        copies += [entry.host for entry in entries if entry.host is not None]
        held = others + sum(copy.size for copy in copies)
        if held != self.tier.used or not 0 <= self.tier.used <= self.tier.budget:
            raise EngineFault("the host tier's bytes are not those of its copies")
        if sum(1 for node in nodes if node.block is None) != self._tree.away:
            raise EngineFault("the count of rows away from the device is wrong")
        if any(node.block is not None and node.host is not None for node in nodes):
            raise EngineFault("rows are on the device and in the host tier at once")
        if any(entry.state is not None and entry.host is not None for entry in entries):
            raise EngineFault("a state is on the device and in the host tier at once")


def _entries_above(node: Node) -> Iterator[Entry]:
    """Entries at a node and at everything that stands on it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node.entry is not None:
            yield node.entry
        waiting.extend(node.children.values())
