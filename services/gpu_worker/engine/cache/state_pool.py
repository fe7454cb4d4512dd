"""Recurrent states of the gated-delta layers: live slots that verify advances, and snapshots that never change.

A slot's life (`fold` = accepted rows of the last verify that its state does not hold yet):

    reset/restore ──> settled (fold 0) ──prefill──> settled
    settled | accepted ──verify(T)──> open ──accept(m)──> accepted (fold m; m = 0 is settled) ──flush──> settled

Snapshots are taken from and restored to settled slots only. Knows no owner: who holds a slot is decided above.
"""

from __future__ import annotations

from services.gpu_worker.engine.config import ModelDims


class StatePool:
    """States of `num_slots` live sequences and `num_snapshots` kept ones, float32."""

    snapshot_bytes: int
    """Bytes of one snapshot: recurrent and conv states of all layers."""

    def __init__(self, dims: ModelDims, num_slots: int, num_snapshots: int, max_verify: int) -> None: ...

    def reset(self, slot: int) -> None:
        """The empty state, valid at position 0; drops a pending fold, also one that was never accepted."""

    def position(self, slot: int) -> int:
        """Rows of the sequence that the slot's state holds (without the fold)."""
        raise NotImplementedError

    def fold(self, slot: int) -> int:
        """Accepted rows that the state does not hold yet. Raises `EngineFault` between verify and accept."""
        raise NotImplementedError

    def take_snapshot(self, slot: int, snapshot: int) -> None:
        """Copy a settled slot. Raises `EngineFault` when a fold is pending."""

    def restore(self, snapshot: int, slot: int) -> None:
        """Make the slot a copy of the snapshot, settled. Raises `EngineFault` when the slot has a fold pending."""

    def digest(self, slot: int) -> bytes:
        """SHA-256 over a settled slot's position and states (negative zeros count as zeros)."""
        raise NotImplementedError
