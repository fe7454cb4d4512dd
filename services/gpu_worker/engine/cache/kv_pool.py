"""The KV rows of all attention planes, in blocks of 64. Knows no owner: `pages` counts references."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.checksum import Checksum, block_checksums
from services.gpu_worker.engine.cache.staging import staged
from services.gpu_worker.engine.config import BLOCK_ROWS, ModelDims
from services.gpu_worker.engine.placement import CPU, Placement
from shared.errors import EngineFault


class KVPool:
    """`k`, `v`: [planes, num_blocks, kv_heads, 64, head_dim] in the placement's type; the last plane is the MTP head's, if
    any. Latent rows are keys and values at once: `v` is `k` then.

    What is copied in and out is `parts` of them: keys and values, or latent rows alone.
    """

    def __init__(self, dims: ModelDims, num_blocks: int, placement: Placement = CPU) -> None:
        shape = (dims.planes, num_blocks, dims.kv_heads, BLOCK_ROWS, dims.head_dim)
        self.k = torch.zeros(shape, dtype=placement.dtype, device=placement.device)
        self.v = self.k if dims.latent else torch.zeros_like(self.k)
        self._parts = (self.k,) if dims.latent else (self.k, self.v)
        self.num_blocks = num_blocks
        self.kv_heads = dims.kv_heads
        self.plane_bytes = dims.row_size * placement.dtype.itemsize
        """Of one row in one plane."""
        self.row_bytes = dims.planes * self.plane_bytes
        self.block_bytes = self.row_bytes * BLOCK_ROWS

    def read_rows(self, block_table: Sequence[int], start: int, stop: int) -> Tensor:
        """Copy rows start..stop-1 of a sequence out: [parts, planes, kv_heads, stop - start, head_dim], keys first.

        Raises `EngineFault` when the table does not cover `stop` rows.
        """
        self._check(block_table, start, stop)
        first, last = start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)
        index = torch.tensor(list(block_table[first:last]), dtype=torch.int64, device=self.k.device)
        rows = torch.stack([_rows(part.index_select(1, index)) for part in self._parts])
        offset = start - first * BLOCK_ROWS
        return rows[:, :, :, offset : offset + stop - start].contiguous()

    def write_rows(self, block_table: Sequence[int], start: int, rows: Tensor) -> None:
        """Copy rows as `read_rows` returns them into a sequence's blocks, from absolute row `start` on."""
        count = rows.shape[3]
        self._check(block_table, start, start + count)
        position = start
        while position < start + count:
            offset = position % BLOCK_ROWS
            take = min(BLOCK_ROWS - offset, start + count - position)
            block = block_table[position // BLOCK_ROWS]
            piece = rows[:, :, :, position - start : position - start + take]
            for part, own in zip(self._parts, piece, strict=True):
                part[:, block, :, offset : offset + take] = own
            position += take

    def read_block(self, block: int) -> Tensor:
        """Copy one block out: [parts, planes, kv_heads, 64, head_dim], keys first."""
        return torch.stack([part[:, block] for part in self._parts])

    def write_block(self, block: int, rows: Tensor) -> None:
        """Copy into one block what `read_block` answered."""
        for part, own in zip(self._parts, rows, strict=True):
            part[:, block] = own

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Copy into blocks what `read_block` answered, some at a time: one transfer for copies that lie side by side, one
        write into the pool for all of them. From pinned memory nothing waits."""
        order = sorted(range(len(blocks)), key=lambda number: rows[number].data_ptr())
        index = torch.tensor([blocks[number] for number in order], dtype=torch.int64).to(self.k.device)
        for some, arrived in staged([rows[number] for number in order], self.k):
            for number, part in enumerate(self._parts):
                part.index_copy_(1, index[some], arrived[:, number].transpose(0, 1))

    def sums_of(self, blocks: Sequence[int]) -> list[Checksum]:
        """The checksum of each block, as if `read_block` had copied it out; computed where it is, one wait for all."""
        index = torch.tensor(list(blocks), dtype=torch.int64).to(self.k.device)
        return [Checksum(one, two) for one, two in block_checksums(self._parts, index).tolist()]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all planes (a shared tail block that is about to be written)."""
        for part in self._parts:
            part[:, target] = part[:, source]

    def _check(self, block_table: Sequence[int], start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(block_table) * BLOCK_ROWS:
            raise EngineFault(f"rows {start}..{stop} are outside a table of {len(block_table)} blocks")


def _rows(blocks: Tensor) -> Tensor:
    """[planes, n, kv_heads, 64, head_dim] -> [planes, kv_heads, n * 64, head_dim]."""
    planes, count, heads, rows, width = blocks.shape
    return blocks.transpose(1, 2).reshape(planes, heads, count * rows, width)
