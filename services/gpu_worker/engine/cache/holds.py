"""Hits between lookup and the last restore of their requests: one set of references a request.

lookup ──> hold ──bring──> on the device ──every choice has restored it──> given back
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from services.gpu_worker.engine.cache.entry import Entry, Hold
from services.gpu_worker.engine.cache.moves import Moves
from services.gpu_worker.engine.cache.pages import BlockAllocator
from services.gpu_worker.engine.cache.tree import Node, PrefixTree
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.requests import GenerateRequest, Hit


class Holds:
    """By request id."""

    def __init__(self, tree: PrefixTree, blocks: BlockAllocator, moves: Moves) -> None:
        self._tree = tree
        self._blocks = blocks
        self._moves = moves
        self._holds: dict[str, Hold] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._holds

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._holds.values())

    def usable(self, request: GenerateRequest) -> Hold | None:
        """The hold that a request may restore; null without one, or when it bypasses the cache."""
        return self._holds.get(request.request_id) if request.use_cache else None

    def lookup(
        self, request_id: str, root: bytes, tokens: Sequence[int], chain: Sequence[bytes]
    ) -> Hit | None:
        """The deepest published state that prefixes `tokens`; the whole prompt counts too (R-Q6).

        Takes references once a request id; the second call answers the same hit.
        """
        hold = self._holds.get(request_id)
        if hold is None:
            path = self._tree.match(root, tokens, chain)
            entry = _deepest(path)
            if entry is None:
                return None
            rows = path[: entry.position // BLOCK_ROWS]
            hold = Hold(
                entry=entry,
                tokens=list(tokens[: entry.position]),
                blocks=[node.block for node in rows if node.block is not None],
            )
            self._blocks.retain(hold.blocks)
            entry.pins += 1
            self._tree.touch(entry)
            self._holds[request_id] = hold
        return Hit(key=hold.entry.key, position=hold.entry.position)

    def deepen(self, request: GenerateRequest) -> None:
        """A stream that came back takes what was published since, if it is more than its hold has, which nobody else
        may be waiting for."""
        hold = self._holds.get(request.request_id)
        if not request.use_cache or (hold is not None and hold.waiting != 1):
            return
        entry = _deepest(self._tree.match(request.root, request.tokens, request.chain))
        if entry is not None and (hold is None or entry.position > hold.entry.position):
            self.drop(request.request_id)
            self.lookup(request.request_id, request.root, request.tokens, request.chain)
            self.expect(request.request_id)

    def drop(self, request_id: str) -> bytes | None:
        """Give a hold back; answers its key, or null when there was none."""
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return None
        self._blocks.release(hold.blocks)
        hold.entry.pins -= 1
        return hold.entry.key

    def bring(self, request_id: str) -> bytes | None:
        """Bring what a request's hit needs from the host tier to the device, checked, before anybody reads it.

        Null when the hit stands, or there is none. Otherwise it is a miss (C3): answers the key, and the hold is gone.
        Room must be free: blocks for the rows, and a snapshot if `needs_snapshot`.
        """
        hold = self._holds.get(request_id)
        if hold is None or (hold.entry.state and len(hold.blocks) * BLOCK_ROWS == hold.entry.position):
            return None
        if not self._moves.is_whole(hold.entry) or not self._moves.bring(hold.entry):
            return self.drop(request_id)
        rows = [node.block for node in self._tree.path(hold.entry.key) if node.block is not None]
        self._blocks.retain(set(rows) - set(hold.blocks))
        hold.blocks = rows
        return None

    def needs_snapshot(self, request_id: str) -> bool:
        """Whether the hit's state is in the host tier."""
        hold = self._holds.get(request_id)
        return hold is not None and hold.entry.host is not None

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
                self.drop(request_id)


def _deepest(path: Iterable[Node]) -> Entry | None:
    """The deepest entry of a matched path that can be restored: its state and all rows exist."""
    best = None
    for node in path:
        if not node.there:
            break
        if node.entry is not None and node.entry.published and node.entry.kept:
            best = node.entry
    return best
