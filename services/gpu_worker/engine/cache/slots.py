"""All that a slot holds besides paged rows, as one thing: recurrent states, and the rings of sliding layers.

A snapshot is the copy of both at one position, so an entry cannot have the one without the other: a restore, a spill to the
host tier, its checksum and an eviction take the tail along. Knows no owner.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.state_pool import StatePool


class DraftTails(Protocol):
    """What a block drafter keeps of a slot, and its tails in snapshots; see `BlockContext`."""

    @property
    def tail_bytes(self) -> int: ...

    @property
    def tail_size(self) -> int: ...

    def reset(self, slot: int) -> None: ...

    def take(self, slot: int, snapshot: int, position: int) -> None: ...

    def restore(self, snapshot: int, slot: int, position: int) -> None: ...

    def read(self, snapshot: int) -> Tensor: ...

    def write(self, snapshot: int, values: Tensor) -> None: ...


class SlotMemory:
    """The face that the cache sees. Errors are those of the two pools, before anything was copied."""

    def __init__(self, states: StatePool, ring: RingPool, draft: DraftTails | None = None) -> None:
        """`draft` = of a block drafter; null = there is none."""
        self._states = states
        self._ring = ring
        self._draft = draft

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot: recurrent and conv states, the window layers' tail, the drafter's tail."""
        draft = self._draft.tail_bytes if self._draft is not None else 0
        return self._states.snapshot_bytes + self._ring.tail_bytes + draft

    def reset(self, slot: int) -> None:
        """An empty slot, at position 0."""
        self._states.reset(slot)
        self._ring.reset(slot)
        if self._draft is not None:
            self._draft.reset(slot)

    def take_snapshot(self, slot: int, snapshot: int) -> None:
        """Copy a settled slot. Raises `EngineFault` when a fold is pending or rows of the window were overwritten."""
        self._ring.take(slot, snapshot, self._states.settled(slot))
        self._states.take_snapshot(slot, snapshot)
        if self._draft is not None:
            self._draft.take(slot, snapshot, self._states.position(slot))

    def restore(self, snapshot: int, slot: int) -> None:
        """Make the slot a copy of the snapshot, settled. Raises `EngineFault` when the slot has a fold pending."""
        self._states.restore(snapshot, slot)
        self._ring.restore(snapshot, slot, self._states.position(slot))
        if self._draft is not None:
            self._draft.restore(snapshot, slot, self._states.position(slot))

    def read_snapshot(self, snapshot: int) -> tuple[Tensor, int]:
        """Copy a snapshot out as one flat float32 tensor, and its position."""
        values, position = self._states.read_snapshot(snapshot)
        parts = [values, self._ring.read(snapshot).to(values.dtype)]
        if self._draft is not None:
            parts.append(self._draft.read(snapshot).to(values.dtype))
        return torch.cat(parts), position

    def write_snapshot(self, snapshot: int, values: Tensor, position: int) -> None:
        """Copy into a snapshot what `read_snapshot` answered."""
        draft = self._draft.tail_size if self._draft is not None else 0
        state = values.numel() - self._ring.tail_size - draft
        self._states.write_snapshot(snapshot, values[:state], position)
        self._ring.write(snapshot, values[state : values.numel() - draft])
        if self._draft is not None:
            self._draft.write(snapshot, values[values.numel() - draft :])
