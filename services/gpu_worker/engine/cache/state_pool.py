"""Recurrent states of the gated-delta layers: live slots that verify advances, and snapshots that never change.

A slot's life (`fold` = accepted rows of the last verify that its state does not hold yet):

    reset/restore ──> settled (fold 0) ──prefill──> settled
    settled | accepted ──verify(T)──> open ──accept(m)──> accepted (fold m; m = 0 is settled) ──flush──> settled

Snapshots are taken from and restored to settled slots only. Knows no owner: who holds a slot is decided above.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from kernels.gated_delta import DeltaShape
from services.gpu_worker.engine.config import ModelDims
from shared.errors import EngineFault

FLOAT_BYTES = 4


def delta_shape(dims: ModelDims) -> DeltaShape:
    """The delta rule's heads and widths of a model."""
    return DeltaShape(dims.gdn_key_heads, dims.gdn_value_heads, dims.gdn_key_dim, dims.gdn_value_dim)


class StatePool:
    """States of `num_slots` live sequences and `num_snapshots` kept ones, float32.

    `state` [layers, slots, value_heads, dk, dv], valid at `position(slot)`.
    `windows` [layers, slots, K - 1 + max_verify, channels]: conv inputs before the last verify's rows, then these rows.
    `store` [layers, slots * max_verify + 1, packed]: the rows of the last verify; the last row stays zero.
    """

    def __init__(self, dims: ModelDims, num_slots: int, num_snapshots: int, max_verify: int) -> None:
        shape, layers, taps = delta_shape(dims), dims.gdn_layers, dims.conv_kernel - 1
        heads = (shape.value_heads, shape.key_dim, shape.value_dim)
        self.num_slots = num_slots
        self.max_verify = max_verify
        self.taps = taps
        self.state = torch.zeros(layers, num_slots, *heads)
        self.windows = torch.zeros(layers, num_slots, taps + max_verify, shape.channels)
        self.store = torch.zeros(layers, num_slots * max_verify + 1, shape.packed)
        self._snapshot_state = torch.zeros(layers, num_snapshots, *heads)
        self._snapshot_windows = torch.zeros(layers, num_snapshots, taps, shape.channels)
        self._snapshot_position = [0] * num_snapshots
        self._position = [0] * num_slots
        self._fold = [0] * num_slots
        self._open = [0] * num_slots
        values = shape.value_heads * shape.key_dim * shape.value_dim + taps * shape.channels
        self.snapshot_bytes = layers * values * FLOAT_BYTES
        """Bytes of one snapshot: recurrent and conv states of all layers."""

    def reset(self, slot: int) -> None:
        """The empty state, valid at position 0; drops a pending fold, also one that was never accepted."""
        self.state[:, slot] = 0.0
        self.windows[:, slot, : self.taps] = 0.0
        self._position[slot] = self._fold[slot] = self._open[slot] = 0

    def position(self, slot: int) -> int:
        """Rows of the sequence that the slot's state holds (without the fold)."""
        return self._position[slot]

    def fold(self, slot: int) -> int:
        """Accepted rows that the state does not hold yet. Raises `EngineFault` between verify and accept."""
        if self._open[slot]:
            raise EngineFault(f"slot {slot}: {self._open[slot]} verified rows were never accepted")
        return self._fold[slot]

    def settled(self, slot: int) -> int:
        """The position of a slot with nothing pending; raises `EngineFault` otherwise."""
        if self.fold(slot):
            raise EngineFault(f"slot {slot}: {self._fold[slot]} accepted rows are not folded in")
        return self._position[slot]

    def advanced(self, slot: int, rows: int) -> None:
        """A prefill moved a settled slot's state by `rows`."""
        self._position[slot] = self.settled(slot) + rows

    def verified(self, slot: int, rows: int) -> None:
        """A verify folded what was pending and left `rows` new rows to accept."""
        self._position[slot] += self.fold(slot)
        self._fold[slot], self._open[slot] = 0, rows

    def accept(self, slot: int, rows: int) -> None:
        """Commit the first `rows` of the open verify. Raises `EngineFault` without one or beyond its rows."""
        if not self._open[slot]:
            raise EngineFault(f"slot {slot}: nothing to accept, the last verify was accepted already")
        if not 0 <= rows <= self._open[slot]:
            raise EngineFault(f"slot {slot}: {rows} rows accepted of {self._open[slot]} verified")
        self._fold[slot], self._open[slot] = rows, 0

    def flushed(self, slot: int) -> None:
        """The pending rows are in the recurrent state: move the conv window to match, and call the slot settled."""
        fold = self.fold(slot)
        if fold:
            window = self.windows[:, slot]
            window[:, : self.taps] = window[:, fold : fold + self.taps].clone()
        self._position[slot] += fold
        self._fold[slot] = 0

    def take_snapshot(self, slot: int, snapshot: int) -> None:
        """Copy a settled slot. Raises `EngineFault` when a fold is pending."""
        self._snapshot_position[snapshot] = self.settled(slot)
        self._snapshot_state[:, snapshot] = self.state[:, slot]
        self._snapshot_windows[:, snapshot] = self.windows[:, slot, : self.taps]

    def restore(self, snapshot: int, slot: int) -> None:
        """Make the slot a copy of the snapshot, settled. Raises `EngineFault` when the slot has a fold pending."""
        self.settled(slot)
        self.state[:, slot] = self._snapshot_state[:, snapshot]
        self.windows[:, slot, : self.taps] = self._snapshot_windows[:, snapshot]
        self._position[slot] = self._snapshot_position[snapshot]

    def read_snapshot(self, snapshot: int) -> tuple[Tensor, int]:
        """Copy a snapshot out: its recurrent, then its conv states as one flat tensor, and its position."""
        parts = (self._snapshot_state[:, snapshot], self._snapshot_windows[:, snapshot])
        return torch.cat([part.reshape(-1) for part in parts]), self._snapshot_position[snapshot]

    def write_snapshot(self, snapshot: int, values: Tensor, position: int) -> None:
        """Copy into a snapshot what `read_snapshot` answered."""
        state = self._snapshot_state[:, snapshot]
        state.copy_(values[: state.numel()].view(state.shape))
        windows = self._snapshot_windows[:, snapshot]
        windows.copy_(values[state.numel() :].view(windows.shape))
        self._snapshot_position[snapshot] = position

    def digest(self, slot: int) -> bytes:
        """SHA-256 over a settled slot's position and states.

        Negative zeros count as zeros: a padded fold step turns one into the other, and nothing downstream can tell.
        """
        content = hashlib.sha256(self.settled(slot).to_bytes(8, "little"))
        for part in (self.state[:, slot], self.windows[:, slot, : self.taps]):
            content.update((part + 0.0).contiguous().numpy().tobytes())
        return content.digest()
