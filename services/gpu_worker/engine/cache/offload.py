"""The host tier: copies of blocks and states that eviction took from the device, within a number of bytes.

    take_block, take_state   device -> host, with a checksum of what was there
    bring_blocks, bring_state host -> fresh blocks or a snapshot, checked where it then is, before anything reads it
    drop                     the bytes are free again

A checksum is computed on the device at both ends, so it covers both copies and the time between. A mismatch is answered,
counted, and never read. On the CPU the tier is other memory beside the pools; the way is the same.

Knows bytes. Does not know entries, keys, who holds what, or which copy should go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.checksum import Checksum, checksum
from services.gpu_worker.engine.cache.host_memory import HostMemory, PlainMemory
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.slots import SlotMemory
from services.gpu_worker.engine.cache.state_pool import StatePool


class Memory(Protocol):
    """The device pools, as the tier sees them. Tensors are float32 copies, of one size a kind."""

    def read_block(self, block: int) -> Tensor: ...

    def write_block(self, block: int, rows: Tensor) -> None: ...

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[Tensor]) -> None: ...

    def sums_of(self, blocks: Sequence[int]) -> list[Checksum]: ...

    def read_snapshot(self, snapshot: int) -> tuple[Tensor, int]: ...

    def write_snapshot(self, snapshot: int, values: Tensor, position: int) -> None: ...


class Pools:
    """`Memory` over the engine's pools; a model without window layers needs no `SlotMemory`."""

    def __init__(self, kv: KVPool, states: StatePool | SlotMemory) -> None:
        self.read_block, self.write_block = kv.read_block, kv.write_block
        self.write_blocks, self.sums_of = kv.write_blocks, kv.sums_of
        self.read_snapshot, self.write_snapshot = states.read_snapshot, states.write_snapshot


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HostCopy:
    """One block, or one state: the snapshot's values, then the hidden [H] of the row before it."""

    values: Tensor
    sum: Checksum
    hidden: int = 0  #: elements of `values` that are the hidden
    position: int = 0  #: of a state

    @property
    def size(self) -> int:
        """Bytes of the values; the sum's 16 are not counted."""
        return self.values.numel() * self.values.element_size()


class HostTier:
    """Counts bytes; holds no copy itself. `taken`, `brought` and `mismatches` count copies and only grow."""

    def __init__(self, budget: int, memory: Memory, host: HostMemory | None = None) -> None:
        """`budget` in bytes; with 0 nothing is ever taken. `host` = where copies lie; null: in plain memory."""
        self._host = host or PlainMemory()
        self.budget = budget
        self.used = 0
        self.taken = self.brought = self.mismatches = 0
        self._memory = memory

    @property
    def free(self) -> int:
        """Bytes left."""
        return self.budget - self.used

    def take_block(self, block: int) -> HostCopy | None:
        """A copy of a block; null when there is no room."""
        rows = self._memory.read_block(block) if self.free > 0 else None
        return self._keep(rows) if rows is not None else None

    def take_state(self, snapshot: int, last_hidden: Tensor) -> HostCopy | None:
        """A copy of a snapshot and of the hidden [H] that belongs to it; null when there is no room."""
        if self.free <= 0:
            return None
        values, position = self._memory.read_snapshot(snapshot)
        both = torch.cat([values, last_hidden.to(values.device)])
        return self._keep(both, hidden=len(last_hidden), position=position)

    def bring_blocks(self, copies: Sequence[HostCopy], blocks: Sequence[int]) -> list[bool]:
        """Write copies into fresh blocks, all of them before the first is checked. False: what arrived is not what was
        taken, and must not be read."""
        if not blocks:
            return []
        self._memory.write_blocks(blocks, [copy.values for copy in copies])
        sums = self._memory.sums_of(blocks)
        return [self._verified(copy, arrived) for copy, arrived in zip(copies, sums, strict=True)]

    def bring_block(self, copy: HostCopy, block: int) -> bool:
        """The same for one."""
        return self.bring_blocks([copy], [block])[0]

    def bring_state(self, copy: HostCopy, snapshot: int) -> Tensor | None:
        """Write a copy into a fresh snapshot; answers the hidden [H]. Null: not what was taken, must not be read."""
        split = copy.values.numel() - copy.hidden
        self._memory.write_snapshot(snapshot, copy.values[:split], copy.position)
        values, _ = self._memory.read_snapshot(snapshot)
        hidden = copy.values[split:].to(values.device, copy=True)
        return hidden if self._verified(copy, checksum(torch.cat([values, hidden]))) else None

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block to another on the device: an unfilled one that several sequences go on from."""
        self._memory.write_block(target, self._memory.read_block(source))

    def drop(self, copy: HostCopy) -> None:
        """A copy is not needed any more."""
        self.used -= copy.size
        self._host.drop(copy.values)

    def _keep(self, values: Tensor, *, hidden: int = 0, position: int = 0) -> HostCopy | None:
        if values.numel() * values.element_size() > self.free:
            return None
        kept = self._host.keep(values)
        if kept is None:
            return None
        copy = HostCopy(values=kept, sum=checksum(values), hidden=hidden, position=position)
        self.used += copy.size
        self.taken += 1
        return copy

    def _verified(self, copy: HostCopy, arrived: Checksum) -> bool:
        good = arrived == copy.sum
        self.brought += good
        self.mismatches += not good
        return good
