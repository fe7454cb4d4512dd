"""One pass of a block drafter over the blocks of several sequences: anchors and masks in, output rows out.

What the host tells is four numbers a sequence, in one tensor of a fixed address, so that a card can keep the pass as a
graph. On the CPU the same code runs without one. Padded sequences stand at position 0 of slot 0 and see no context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from services.gpu_worker.engine.batch import BlockAsk
from services.gpu_worker.engine.graphs import GraphCache, Size, bucket
from services.gpu_worker.engine.models.block import BlockDrafter, ContextView
from services.gpu_worker.engine.models.block_ring import DraftRing
from services.gpu_worker.engine.models.family import Model

_TOLD: Final = 4
"""Numbers a sequence: slot, position of the anchor, oldest row that its ring has, anchor."""


class BlockPass:
    """Over at most `most` sequences at once."""

    def __init__(self, drafter: BlockDrafter, target: Model, ring: DraftRing, *, most: int) -> None:
        self._drafter, self._target, self._ring, self._most = drafter, target, ring, most
        self._mask_id = torch.tensor([drafter.dims.mask_token], device=ring.k.device)
        self._told = torch.zeros(_TOLD, most, dtype=torch.int64, device=ring.k.device)
        self._graphs: GraphCache[Size] = GraphCache(
            self.launch, self._clear, enabled=drafter.placement.graphs
        )

    def run(self, asks: Sequence[BlockAsk]) -> Tensor:
        """Output rows [S, B, H] of the blocks; the context rows of every slot are in its ring."""
        size = bucket(len(asks), self._most), self._drafter.dims.block
        graphed = self._graphs.prepare(size)
        told = [
            [ask.slot for ask in asks],
            [ask.start for ask in asks],
            [self._ring.low(ask.slot) for ask in asks],
            [ask.anchor for ask in asks],
        ]
        self._told[:, : len(asks)] = torch.tensor(told)
        if not graphed:
            return self.launch((len(asks), size[1]))
        self._told[:, len(asks) : size[0]] = 0
        return self._graphs.run(size)[: len(asks)].clone()

    def launch(self, size: Size) -> Tensor:
        """The pass of the first `size[0]` sequences told."""
        return self.block(*self._told[:, : size[0]].unbind(0))

    def block(self, slots: Tensor, starts: Tensor, lows: Tensor, anchors: Tensor) -> Tensor:
        """Output rows [S, B, H] of the blocks of S sequences, each tensor [S] of integers; part of a captured launch."""
        return self._drafter.forward(self._embedded(anchors), self._view(slots, starts, lows))

    def _clear(self) -> None:
        self._told.zero_()

    def _embedded(self, anchors: Tensor) -> Tensor:
        """[S, B, H]: anchors, then masks."""
        rows = self._target.embed(torch.cat([anchors, self._mask_id]))
        mask = rows[-1] if self._drafter.mask_row is None else self._drafter.mask_row
        x = mask.expand(len(anchors), self._drafter.dims.block, -1).clone()
        x[:, 0] = rows[:-1]
        return x

    def _view(self, slots: Tensor, starts: Tensor, lows: Tensor) -> ContextView:
        dims, ring, rope = self._drafter.dims, self._ring, self._drafter.rope
        steps = torch.arange(dims.block, device=slots.device)
        own, newest = starts[:, None] + steps, starts[:, None] - 1
        # Which position each row of a ring holds; before row 0 there is none.
        rows = torch.arange(ring.rows_each, device=slots.device)
        held = newest - (newest - rows) % ring.rows_each
        context = (held[:, None] <= own[:, :, None] - dims.window) | (held < lows[:, None])[:, None]
        ahead = (
            steps[None, :] > steps[:, None] if dims.causal else (steps[:, None] < 0).expand(-1, dims.block)
        )
        block = ahead.expand(len(slots), -1, -1)
        return ContextView(
            keys=list(_of_slots(ring.k, slots)),
            values=list(_of_slots(ring.v, slots)),
            hidden=torch.cat([context, block], dim=2)[:, None, None],
            cos_sin=rope.index_select(0, own.flatten().clamp_(max=len(rope) - 1)),
        )


def _of_slots(planes: Tensor, slots: Tensor) -> Tensor:
    """[planes, slots, kv_heads, rows, head_dim] -> the same of S slots; one on the CPU is read where it lies."""
    if len(slots) == 1 and not planes.is_cuda:
        return planes.narrow(1, int(slots[0]), 1)
    return planes.index_select(1, slots)
