"""Recurrent states of the gated-delta layers: live slots that verify advances, and snapshots that never change.

A slot's life (`fold` = accepted rows that its state does not hold yet):

    reset/restore ──> settled (fold 0) ──prefill──> settled
    settled | accepted ──verify(T)──> open ──accept(m)──> accepted (fold + m; 0 is settled) ──flush──> settled

A verify replays what is pending and, when `stores` says so, writes the state and so brings fold to 0 first. On the CPU it
always does. On a card it waits until `fold_rows` are pending, since writing a state costs more than replaying rows.

The kept rows of a slot on a card are a ring: row `head` + i is pending row i, the conv inputs before it are the K - 1 rows
before. A settled slot has its conv inputs in the first K - 1 rows of its window and head K - 1, on either device.

Snapshots are taken from and restored to settled slots only. Knows no owner: who holds a slot is decided above.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from kernels.gated_delta import DeltaShape
from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.placement import CPU, Placement
from shared.errors import EngineFault


def delta_shape(dims: ModelDims) -> DeltaShape:
    """The delta rule's heads and widths of a model."""
    return DeltaShape(dims.gdn_key_heads, dims.gdn_value_heads, dims.gdn_key_dim, dims.gdn_value_dim)


class StatePool:
    """States of `num_slots` live sequences and `num_snapshots` kept ones, float32.

    `state` [layers, slots, value_heads, dk, dv], valid at `position(slot)`. On the CPU:
    `windows` [layers, slots, K - 1 + max_verify, channels]: conv inputs before the last verify's rows, then these rows.
    `store` [layers, slots * max_verify + 1, packed]: the rows of the last verify; the last row stays zero.
    On a card both are rings of `capacity` rows a slot, [layers, slots, capacity, ...], the windows in the activations'
    type, and there is one slot more (`scratch`) for the padding of a launch.
    """

    def __init__(
        self,
        dims: ModelDims,
        num_slots: int,
        num_snapshots: int,
        max_verify: int,
        placement: Placement = CPU,
    ) -> None:
        shape, layers, taps = delta_shape(dims), dims.gdn_layers, dims.conv_kernel - 1
        heads = (shape.value_heads, shape.key_dim, shape.value_dim)
        self.num_slots = num_slots
        self.max_verify = max_verify
        self.taps = taps
        self.scratch = num_slots
        self.placement = placement
        self._fold_rows = placement.fold_rows
        self.capacity = taps + placement.fold_rows + 2 * max_verify if placement.on_card else max_verify

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, *size, dtype=dtype, device=placement.device)

        if placement.on_card:
            self.state = zeros(num_slots + 1, *heads)
            self.windows = zeros(num_slots + 1, self.capacity, shape.channels, dtype=placement.dtype)
            self.store = zeros(num_slots + 1, self.capacity, shape.packed)
        else:
            self.state = zeros(num_slots, *heads)
            self.windows = zeros(num_slots, taps + max_verify, shape.channels)
            self.store = zeros(num_slots * max_verify + 1, shape.packed)
        self._snapshot_state = zeros(num_snapshots, *heads)
        self._snapshot_windows = zeros(num_snapshots, taps, shape.channels, dtype=self.windows.dtype)
        self._snapshot_position = [0] * num_snapshots
        self._position = [0] * num_slots
        self._head = [taps] * num_slots
        self._fold = [0] * num_slots
        self._open = [0] * num_slots
        cell, tail = shape.value_heads * shape.key_dim * shape.value_dim, taps * shape.channels
        self.snapshot_bytes = layers * (cell * self.state.element_size() + tail * self.windows.element_size())
        """Bytes of one snapshot: recurrent and conv states of all layers."""

    def reset(self, slot: int) -> None:
        """The empty state, valid at position 0; drops a pending fold, also one that was never accepted."""
        self.state[:, slot] = 0.0
        self.windows[:, slot, : self.taps] = 0.0
        self.reset_position(slot)

    def reset_position(self, slot: int) -> None:
        """Forget what is pending and where the slot is, not what it holds: for whoever measures on noise."""
        self._head[slot] = self.taps
        self._position[slot] = self._fold[slot] = self._open[slot] = 0

    def head(self, slot: int) -> int:
        """Row of the slot's ring where its pending rows begin."""
        return self._head[slot]

    def stores(self, slot: int) -> bool:
        """Whether the next verify writes the state after the pending rows."""
        return self.fold(slot) >= self._fold_rows

    def position(self, slot: int) -> int:
        """Rows of the sequence that the slot's state holds (without the fold)."""
        return self._position[slot]

    def is_open(self, slot: int) -> bool:
        """Whether a verify waits to be accepted."""
        return self._open[slot] > 0

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
        """A verify left `rows` new rows to accept, and folded what was pending if `stores` said so."""
        if self.stores(slot):
            self._folded(slot)
        self._open[slot] = rows

    def accept(self, slot: int, rows: int) -> None:
        """Commit the first `rows` of the open verify. Raises `EngineFault` without one or beyond its rows."""
        if not self._open[slot]:
            raise EngineFault(f"slot {slot}: nothing to accept, the last verify was accepted already")
        if not 0 <= rows <= self._open[slot]:
            raise EngineFault(f"slot {slot}: {rows} rows accepted of {self._open[slot]} verified")
        self._fold[slot] += rows
        self._open[slot] = 0
        if not self._fold[slot]:
            self.flushed(slot)

    def flushed(self, slot: int) -> None:
        """The pending rows are in the recurrent state: move the conv window to match, and call the slot settled."""
        first = self._head[slot] - self.taps + self.fold(slot)
        if first:
            window = self.windows[:, slot]
            rows = [(first + row) % window.shape[1] for row in range(self.taps)]
            window[:, : self.taps] = window[:, rows]
        self._folded(slot)
        self._head[slot] = self.taps

    def _folded(self, slot: int) -> None:
        """The state holds the pending rows. On the CPU the twin moves the window itself, so that the head stays."""
        fold = self._fold[slot]
        self._position[slot] += fold
        self._fold[slot] = 0
        if self.placement.on_card:
            self._head[slot] = (self._head[slot] + fold) % self.capacity

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
        self._head[slot] = self.taps

    def read_snapshot(self, snapshot: int) -> tuple[Tensor, int]:
        """Copy a snapshot out: its recurrent, then its conv states as one flat float32 tensor, and its position."""
        parts = (self._snapshot_state[:, snapshot], self._snapshot_windows[:, snapshot].float())
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
            content.update((part + 0.0).contiguous().float().cpu().numpy().tobytes())
        return content.digest()
