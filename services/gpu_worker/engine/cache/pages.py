"""Who holds which block, slot and snapshot. Counts only: the bytes are in `kv_pool` and `state_pool`.

Conservation, at every moment: free + referenced == total, and an id is free if and only if its count is 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.errors import EngineFault


class BlockAllocator:
    """Reference counts of KV blocks. A block returns to the free list when its last reference goes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._refs = [0] * total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def refs(self, block: int) -> int:
        """References on a block; 0 = free."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or null (and nothing taken) when there are not as many."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference on each. Raises EngineFault on a free block, before any count changes."""
        blocks = list(blocks)
        self._demand_held(blocks)
        for block in blocks:
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> int:
        """One reference less on each; answers how many became free. Raises EngineFault on a free block first."""
        blocks = list(blocks)
        self._demand_held(blocks)
        freed = 0
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)
                freed += 1
        return freed

    def check(self) -> None:
        """Raises EngineFault when the conservation equation does not hold."""
        held = sum(1 for count in self._refs if count > 0)
        if len(self._free) + held != self.total or any(self._refs[block] for block in self._free):
            raise EngineFault(f"blocks: {len(self._free)} free + {held} held is not {self.total}")

    def _demand_held(self, blocks: list[int]) -> None:
        for block in blocks:
            if self._refs[block] < 1:
                raise EngineFault(f"block {block} is free")


class IdPool:
    """Exclusive ids: recurrent slots and snapshots."""

    def __init__(self, total: int, name: str) -> None:
        self.total = total
        self._name = name
        self._free = list(range(total - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return len(self._held)

    def acquire(self) -> int | None:
        """An id, or null when all are held."""
        if not self._free:
            return None
        index = self._free.pop()
        self._held.add(index)
        return index

    def release(self, index: int) -> None:
        """Give an id back. Raises EngineFault on one that is not held."""
        if index not in self._held:
            raise EngineFault(f"{self._name} {index} is not held")
        self._held.remove(index)
        self._free.append(index)
