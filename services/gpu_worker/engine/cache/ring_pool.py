"""The newest KV rows of the sliding-window layers: a ring of blocks a live slot, and tails that never change.

A window layer of window W lets the row at t see the keys t - W < p <= t. So a sequence needs its last W - 1 rows and
those of the launch, however long it is: a ring of `blocks_each` blocks, which belongs to its slot as the recurrent state
does. Logical block b of a slot lies at `b % blocks_each` of its ring; writing block b ends block b - blocks_each.

    reset/restore ──> rows (low, end] ──wrote──> the oldest blocks end
                        └──take──> tail of a snapshot: a copy of the W - 1 rows before its position ──restore──> rows

Nothing is published from a ring, since its rows end while their sequence goes on; what an entry keeps is the tail that was
copied at its boundary. Knows no owner: who holds a slot or a snapshot is decided above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, overload

import torch
from torch import Tensor

from services.gpu_worker.engine.config import BLOCK_ROWS
from shared.errors import EngineFault


class RingDims(Protocol):
    """What a ring asks of a model's dimensions."""

    @property
    def window_layers(self) -> int:
        """Planes; 0 = there is nothing to keep."""
        ...

    @property
    def window(self) -> int:
        """Keys that a row sees, itself among them."""
        ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


def ring_rows(dims: RingDims, *, prefill_rows: int, max_verify: int) -> tuple[int, int]:
    """(blocks of one ring, rows of one tail): the window and the widest launch; 0 for a model without sliding layers.

    A prefill starts on the grid, a verify anywhere.
    """
    if not dims.window_layers:
        return 0, 0
    tail = dims.window - 1
    on_grid = -(-prefill_rows // BLOCK_ROWS) + -(-tail // BLOCK_ROWS)
    anywhere = -(-(tail + max_verify - 1) // BLOCK_ROWS) + 1
    return max(on_grid, anywhere), tail


class RingTable(Sequence[int]):
    """A slot's block table, endless: entry b is where logical block b lies while it is resident."""

    def __init__(self, first: int, count: int) -> None:
        """The ring is the blocks `first` .. `first + count - 1` of the pool."""
        self._first = first
        self._count = count

    def __len__(self) -> int:
        return 1 << 62

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self._first + block % self._count for block in range(index.start or 0, index.stop)]
        return self._first + index % self._count


class RingPool:
    """`k`, `v`: [window planes, num_slots * blocks_each, kv_heads, 64, head_dim]; empty for a model without windows."""

    def __init__(
        self,
        dims: RingDims,
        num_slots: int,
        num_snapshots: int,
        *,
        prefill_rows: int,
        max_verify: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`prefill_rows`, `max_verify` = most rows of one launch of a sequence, on the grid and off it."""
        self.planes = dims.window_layers
        self.kv_heads = dims.kv_heads
        self.window = dims.window
        self.blocks_each, self.tail_rows = ring_rows(dims, prefill_rows=prefill_rows, max_verify=max_verify)
        """Blocks of a ring, and rows before a position that the next row sees."""
        self.num_slots = num_slots
        shape = (self.planes, num_slots * self.blocks_each, dims.kv_heads, BLOCK_ROWS, dims.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        tail = (num_snapshots, 2, self.tail_rows, self.planes, dims.kv_heads, dims.head_dim)
        self._tails = torch.zeros(tail, dtype=dtype, device=device)
        self._low = [0] * num_slots
        self._end = [0] * num_slots
        self.tail_size = 2 * self.tail_rows * self.planes * dims.kv_heads * dims.head_dim
        """Elements of one tail."""

    @property
    def tail_bytes(self) -> int:
        """Bytes of one tail."""
        return self.tail_size * self.k.element_size()

    @property
    def ring_bytes(self) -> int:
        """Bytes of one slot's ring, whatever the length of its sequence."""
        rows = self.blocks_each * BLOCK_ROWS
        return 2 * self.planes * rows * self.k.shape[2] * self.k.shape[4] * self.k.element_size()

    def table(self, slot: int) -> RingTable:
        """Where the logical blocks of a slot lie."""
        return RingTable(slot * self.blocks_each, self.blocks_each)

    # -- what is there ------------------------------------------------------------------------------------------

    def first_block(self, slot: int) -> int:
        """First logical block that is not overwritten."""
        return max(0, (self._end[slot] - 1) // BLOCK_ROWS - self.blocks_each + 1)

    def block_for(self, slot: int, logical: int) -> int | None:
        """Where rows 64 `logical` on lie; null = they were never here, or are no longer (R-Q25)."""
        here = self._low[slot] < (logical + 1) * BLOCK_ROWS and logical * BLOCK_ROWS < self._end[slot]
        return self.table(slot)[logical] if here and logical >= self.first_block(slot) else None

    def is_resident(self, slot: int, position: int) -> bool:
        """Whether every row that the row at `position` sees is still in the slot's ring (R-S14)."""
        first = max(0, position - self.tail_rows)
        return first >= position or (self.low(slot) <= first and position <= self._end[slot])

    # -- a slot's life ------------------------------------------------------------------------------------------

    def reset(self, slot: int) -> None:
        """No rows."""
        self._low[slot] = self._end[slot] = 0

    def begin(self, slot: int, position: int) -> None:
        """No rows, and the next one is `position`."""
        self._low[slot] = self._end[slot] = position

    def end(self, slot: int) -> int:
        """Position after the newest row."""
        return self._end[slot]

    def low(self, slot: int) -> int:
        """The oldest row that is there, if there are any."""
        return max(self._low[slot], self.first_block(slot) * BLOCK_ROWS)

    def wrote(self, slot: int, end: int) -> None:
        """A launch wrote rows up to `end` - 1, some of which may be rejected later; what they overwrote is gone."""
        self._end[slot] = max(self._end[slot], end)

    def take(self, slot: int, snapshot: int, position: int) -> None:
        """Copy the tail at `position`. Raises `EngineFault` when rows of it were overwritten."""
        if not self.is_resident(slot, position):
            raise EngineFault(
                f"slot {slot}: the window's rows before {position} are not in its ring any more"
            )
        if self.planes:
            self._tails[snapshot] = self.tail(slot, position)

    def restore(self, snapshot: int, slot: int, position: int) -> None:
        """Make the ring hold what `take` copied at `position`, and nothing else."""
        first = max(0, position - self.tail_rows)
        self._low[slot], self._end[slot] = first, position
        if self.planes and position > first:
            blocks, offsets = self.places(slot, first, position)
            rows = self._tails[snapshot, :, self.tail_rows - (position - first) :]
            self.k[:, blocks, :, offsets], self.v[:, blocks, :, offsets] = rows[0], rows[1]

    def tail(self, slot: int, position: int) -> Tensor:
        """[2, W - 1, planes, kv_heads, head_dim], keys first: the rows before `position`; zeros before row 0."""
        first = max(0, position - self.tail_rows)
        blocks, offsets = self.places(slot, first, position)
        rows = self._tails.new_zeros(self._tails.shape[1:])
        kept = self.tail_rows - (position - first)
        rows[0, kept:], rows[1, kept:] = self.k[:, blocks, :, offsets], self.v[:, blocks, :, offsets]
        return rows

    def read(self, snapshot: int) -> Tensor:
        """Copy a tail out, flat."""
        return self._tails[snapshot].reshape(-1)

    def write(self, snapshot: int, values: Tensor) -> None:
        """Copy into a tail what `read` answered."""
        self._tails[snapshot].copy_(values.view(self._tails.shape[1:]))

    def places(self, slot: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Block and row in it of rows first..stop-1."""
        rows = torch.arange(first, stop, device=self.k.device)
        ring = rows // BLOCK_ROWS % self.blocks_each if self.blocks_each else rows
        return slot * self.blocks_each + ring, rows % BLOCK_ROWS
