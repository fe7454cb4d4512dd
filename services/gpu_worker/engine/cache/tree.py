"""The prefix tree: one node a block of 64 rows, found by its chain key; entries at some nodes.

Invariants, which make the broker's ledger exact:
- a node's block, where its rows are on the device, has one reference of the tree; and every node is owned by exactly one
  entry: the nearest at or above it (away from the root);
- the path forks only at entries (or at the root), so that shared rows have one owner;
- an entry is published only after its parent.

A chain key names all tokens up to its boundary under one root; a match still compares the root and the tokens, so a
wrong key can cost a hit and never serve another prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.gpu_worker.engine.cache.entry import Entry
from services.gpu_worker.engine.cache.offload import HostCopy
from services.gpu_worker.engine.config import BLOCK_ROWS
from shared.errors import EngineFault


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """One block of rows below `position`."""

    key: bytes
    root: bytes
    tokens: tuple[int, ...]
    block: int | None  #: null = the rows are not on the device
    position: int
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    entry: Entry | None = None
    host: HostCopy | None = None  #: the rows, when they were spilled; never beside `block`

    @property
    def there(self) -> bool:
        """Whether the rows exist, here or in the host tier."""
        return self.block is not None or self.host is not None


class PrefixTree:
    """Nodes and entries by key. Counts no references: the manager does, from what these methods answer."""

    def __init__(self) -> None:
        self.away = 0
        """Nodes whose rows are not on the device."""
        self._nodes: dict[bytes, Node] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def entries(self) -> Iterator[Entry]:
        """All entries, published or not."""
        return (node.entry for node in self._nodes.values() if node.entry is not None)

    def nodes(self) -> Iterator[Node]:
        """All nodes."""
        return iter(self._nodes.values())

    def blocks(self) -> Iterator[int]:
        """The blocks of all rows that are on the device."""
        return (node.block for node in self._nodes.values() if node.block is not None)

    def entry(self, key: bytes) -> Entry | None:
        """The entry at a key."""
        node = self._nodes.get(key)
        return node.entry if node else None

    def match(self, root: bytes, tokens: Sequence[int], chain: Sequence[bytes]) -> list[Node]:
        """The longest path whose nodes hold exactly these tokens under this root. Takes no references."""
        path: list[Node] = []
        for index, key in enumerate(chain):
            node = self._nodes.get(key)
            block = tuple(tokens[index * BLOCK_ROWS : (index + 1) * BLOCK_ROWS])
            parent = path[-1] if path else None
            if node is None or node.root != root or node.parent is not parent or node.tokens != block:
                break
            path.append(node)
        return path

    def path(self, key: bytes) -> list[Node]:
        """The nodes from the root to the one at `key`."""
        path: list[Node] = []
        node: Node | None = self._nodes[key]
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def touch(self, entry: Entry) -> None:
        """Note a use: the deepest used entry alone, not its ancestors."""
        self._tick += 1
        entry.used_at = self._tick

    @property
    def tick(self) -> int:
        """Logical time of the last use."""
        return self._tick

    def grow(
        self, root: bytes, tokens: Sequence[int], chain: Sequence[bytes], blocks: Sequence[int]
    ) -> list[int]:
        """Add the missing nodes of a path; answers the blocks of the new ones, for the caller to reference.

        Raises EngineFault when the new part would fork where no entry is.
        """
        path = self.match(root, tokens, chain)
        tip = path[-1] if path else None
        if self.forks(path, len(chain)):
            raise EngineFault("a path may fork only at an entry")
        added = []
        for index in range(len(path), len(chain)):
            if chain[index] in self._nodes:
                raise EngineFault("two prefixes share a chain key")
            node = Node(
                key=chain[index],
                root=root,
                tokens=tuple(tokens[index * BLOCK_ROWS : (index + 1) * BLOCK_ROWS]),
                block=blocks[index],
                position=(index + 1) * BLOCK_ROWS,
                parent=tip,
            )
            self._nodes[node.key] = node
            if tip is not None:
                tip.children[node.key] = node
            added.append(blocks[index])
            tip = node
        return added

    @staticmethod
    def forks(path: Sequence[Node], depth: int) -> bool:
        """Whether growing a matched `path` to `depth` nodes would fork where no entry is."""
        return 0 < len(path) < depth and path[-1].entry is None

    def below(self, key: bytes) -> Entry | None:
        """The nearest entry strictly nearer to the root."""
        node = self._nodes[key].parent
        while node is not None and node.entry is None:
            node = node.parent
        return node.entry if node else None

    def place(self, key: bytes, splits: Entry | None) -> Entry:
        """Make the node at `key` an entry. `splits` = the entry that owned it, whose parent becomes the new one."""
        node = self._nodes[key]
        if node.entry is not None:
            raise EngineFault("there is an entry at this key")
        entry = Entry(key=key, position=node.position, parent=self.below(key))
        node.entry = entry
        if splits is not None:
            splits.parent = entry
            entry.children = 1
        elif entry.parent is not None:
            entry.parent.children += 1
        self.touch(entry)
        return entry

    def unplace(self, entry: Entry, heir: Entry | None) -> list[Node]:
        """Take an entry away. With an `heir` (its only child) the rows pass to it; without, they leave the tree.

        Answers the nodes that went. Raises EngineFault when other entries stand on it.
        """
        if entry.children != (0 if heir is None else 1) or (heir is not None and heir.parent is not entry):
            raise EngineFault("an entry with children cannot go")
        node: Node | None = self._nodes[entry.key]
        self._nodes[entry.key].entry = None
        if heir is not None:
            heir.parent = entry.parent
            return []
        if entry.parent is not None:
            entry.parent.children -= 1
        gone = []
        while node is not None and node.entry is None and not node.children:
            del self._nodes[node.key]
            gone.append(node)
            if node.parent is not None:
                del node.parent.children[node.key]
            node = node.parent
        return gone

    def owner(self, key: bytes) -> Entry:
        """Which entry owns the rows of a node: the nearest at or above it, on what is a single path until there."""
        node = self._nodes[key]
        while node.entry is None:
            (node,) = node.children.values()
        return node.entry

    def span(self, entry: Entry) -> Iterator[Node]:
        """The nodes that an entry owns, from its position towards the root."""
        node: Node | None = self._nodes[entry.key]
        while node is not None and node.position > entry.floor:
            yield node
            node = node.parent
