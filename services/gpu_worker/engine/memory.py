"""What an engine takes of a card's memory, decided at its start: weights are there, launches get a reserve, states and
snapshots are as many as the settings say, and KV blocks are the rest, unless the settings name their number too.

Nothing grows afterwards, so that admission by free blocks and slots is admission against real headroom. A launch that still
does not fit is one request's affair (`OutOfMemory`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from services.gpu_worker.engine.cache.ring_pool import ring_rows
from services.gpu_worker.engine.cache.state_pool import delta_shape
from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig, ModelDims
from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.models.block_ring import draft_elements
from services.gpu_worker.engine.placement import Placement
from shared.errors import EngineFault

GRAPH_BYTES: Final = 1 << 30
"""Graphs of all sizes, and what kernels keep between launches."""

SPARE_SHARE: Final = 0.03
"""Of the card, left to fragmentation and to the driver."""

_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes by what takes them, `free` before any of it but the weights."""

    parts: Mapping[str, int]
    free: int
    num_blocks: int

    @property
    def wanted(self) -> int:
        """All parts but the weights, which lie there already."""
        return sum(size for name, size in self.parts.items() if name != "weights")

    def lines(self) -> list[str]:
        """A table for the log."""
        rows = [f"{name:<10} {size / 2**30:8.2f} GiB" for name, size in self.parts.items()]
        return [*rows, f"{'left':<10} {(self.free - self.wanted) / 2**30:8.2f} GiB"]


def plan(
    dims: ModelDims,
    placement: Placement,
    config: EngineConfig,
    *,
    free: int,
    total: int,
    weights: int,
    drafter: BlockDims | None = None,
) -> MemoryPlan:
    """Divide `free` bytes of a card of `total`; `drafter` = a block drafter's dimensions, whose weights are there. Raises
    `EngineFault` when not even one sequence would fit."""
    item = placement.dtype.itemsize
    block = dims.planes * dims.row_size * BLOCK_ROWS * item
    parts = {
        "weights": weights,
        "launches": GRAPH_BYTES + _launch_bytes(dims, config, item),
        "states": _state_bytes(dims, placement, config),
        "rings": _ring_bytes(dims, config, item) + _draft_bytes(drafter, config, item),
        "spare": int(total * SPARE_SHARE),
    }
    left = free - sum(size for name, size in parts.items() if name != "weights")
    least = -(-min(config.max_context, dims.max_positions) // BLOCK_ROWS)
    # Where every layer slides a block has no bytes, and as many as all slots can fill are enough.
    blocks = config.num_blocks or (left // block if block else config.num_slots * least)
    if blocks * block > left or blocks < least:
        raise EngineFault(
            f"a card with {free / 2**30:.1f} GiB free: {blocks} blocks of KV ({blocks * block / 2**30:.1f} GiB) beside "
            f"{(free - left) / 2**30:.1f} GiB of states, launches and spare; one sequence needs {least}"
        )
    return MemoryPlan(parts=parts | {"kv": blocks * block}, free=free, num_blocks=blocks)


def fitted(
    config: EngineConfig, dims: ModelDims, placement: Placement, drafter: BlockDims | None = None
) -> tuple[EngineConfig, MemoryPlan | None]:
    """The config with its number of blocks, and the plan; null where memory is not a card's.

    `num_blocks` 0 = as many as fit, on a card only. Raises `EngineFault` when the settings do not fit.
    """
    if not placement.graphs:
        if not config.num_blocks:
            raise EngineFault(
                "num_blocks 0 asks for as many as a card has room for: name a number on the CPU"
            )
        return config, None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(placement.device)
    weights = torch.cuda.memory_allocated(placement.device)
    made = plan(dims, placement, config, free=free, total=total, weights=weights, drafter=drafter)
    return replace(config, num_blocks=made.num_blocks), made


def _launch_bytes(dims: ModelDims, config: EngineConfig, item: int) -> int:
    """The widest intermediate results of a prefill and of a verify, generously."""
    shape = delta_shape(dims)
    wide = (
        max(shape.packed * (item + 2 * _FLOAT_BYTES), 2 * dims.intermediate * item) + 8 * dims.hidden * item
    )
    prefill = config.prefill_chunk * wide * 2
    verify = config.max_batch * config.max_verify * (2 * dims.vocab * _FLOAT_BYTES + wide)
    return prefill + verify


def _ring_bytes(dims: ModelDims, config: EngineConfig, item: int) -> int:
    """Rings of the slots, and tails of the snapshots."""
    each, tail = ring_rows(dims, prefill_rows=config.prefill_chunk, max_verify=config.max_verify)
    rows = config.num_slots * each * BLOCK_ROWS + config.num_snapshots * tail
    return 2 * dims.window_layers * rows * dims.kv_heads * dims.head_dim * item


def _draft_bytes(drafter: BlockDims | None, config: EngineConfig, item: int) -> int:
    """The block drafter's rings and tails, and the rings that a pass gathers."""
    if drafter is None:
        return 0
    return draft_elements(drafter, config.num_slots, config.num_snapshots, gathered=config.max_batch) * item


def _state_bytes(dims: ModelDims, placement: Placement, config: EngineConfig) -> int:
    """Slots with their rings, the scratch slot, snapshots: as `StatePool` lays them out on a card."""
    shape, taps = delta_shape(dims), dims.conv_kernel - 1
    cell = shape.value_heads * shape.key_dim * shape.value_dim * _FLOAT_BYTES
    ring = taps + placement.fold_rows + 2 * config.max_verify
    row = shape.packed * _FLOAT_BYTES + shape.channels * placement.dtype.itemsize
    slots = (config.num_slots + 1) * (cell + ring * row)
    snapshots = config.num_snapshots * (cell + taps * shape.channels * placement.dtype.itemsize)
    return dims.gdn_layers * (slots + snapshots)
