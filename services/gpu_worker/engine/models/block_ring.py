"""Where a block drafter's context rows lie: the ring of sliding layers, with a window and a block of rows as its tail."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.gpu_worker.engine.cache.ring_pool import RingPool, ring_rows
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class TailShape:
    """The ring of a drafter: a tail is the window and a block."""

    window_layers: int
    window: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, dims: BlockDims) -> TailShape:
        return cls(
            window_layers=dims.layers,
            window=dims.tail_rows + 1,  # a ring's tail is its window without the row itself
            kv_heads=dims.kv_heads,
            head_dim=dims.head_dim,
        )


class DraftRing(RingPool):
    """Laid out so that a slot's rows follow one another: [planes, slots, kv_heads, rows, head_dim]. There is one slot more
    (`scratch`), where a card's rounds put rows that are nobody's."""

    def __init__(self, dims: BlockDims, num_slots: int, num_snapshots: int, placement: Placement) -> None:
        super().__init__(
            TailShape.of(dims),
            num_slots + 1,
            num_snapshots,
            prefill_rows=BLOCK_ROWS,
            max_verify=1,
            dtype=placement.dtype,
            device=placement.device,
        )
        self.scratch = num_slots
        self.rows_each = self.blocks_each * BLOCK_ROWS
        shape = (self.planes, num_slots + 1, dims.kv_heads, self.rows_each, dims.head_dim)
        self.k, self.v = self.k.view(shape), self.v.view(shape)

    def places(self, slot: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Slot and row in its ring of rows first..stop-1."""
        rows = torch.arange(first, stop, device=self.k.device) % self.rows_each
        return torch.full_like(rows, slot), rows


def draft_elements(dims: BlockDims, num_slots: int, num_snapshots: int, *, gathered: int = 0) -> int:
    """Elements of so many rings and tails, and of the rings that a pass over `gathered` sequences copies."""
    blocks, tail = ring_rows(TailShape.of(dims), prefill_rows=BLOCK_ROWS, max_verify=1)
    rows = (num_slots + 1 + gathered) * blocks * BLOCK_ROWS + num_snapshots * tail
    return 2 * dims.layers * rows * dims.kv_heads * dims.head_dim
