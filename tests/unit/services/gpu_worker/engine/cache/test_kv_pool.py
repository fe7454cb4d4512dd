"""KV rows in blocks."""

from __future__ import annotations

import pytest
import torch

from kernels.checksum import checksum
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.models.random import TINY
from shared.errors import EngineFault

TABLE = [5, 1, 7]


def _pool() -> KVPool:
    pool = KVPool(TINY, 8)
    pool.k.normal_(generator=torch.Generator().manual_seed(0))
    pool.v.normal_(generator=torch.Generator().manual_seed(1))
    return pool


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 192), (0, 1), (63, 65), (64, 128), (100, 101), (70, 70), (191, 192)]
)
def test_rows_read_are_the_rows_of_the_blocks(start: int, stop: int) -> None:
    pool = _pool()
    rows = pool.read_rows(TABLE, start, stop)
    assert rows.shape == (2, TINY.planes, TINY.kv_heads, stop - start, TINY.head_dim)
    for row in range(start, stop):
        assert torch.equal(rows[0, :, :, row - start], pool.k[:, TABLE[row // 64], :, row % 64])
        assert torch.equal(rows[1, :, :, row - start], pool.v[:, TABLE[row // 64], :, row % 64])


@pytest.mark.parametrize(("start", "stop"), [(0, 192), (63, 65), (10, 150), (70, 70)])
def test_written_rows_are_read_back_and_touch_nothing_else(start: int, stop: int) -> None:
    pool, before = _pool(), _pool()
    rows = torch.randn(2, TINY.planes, TINY.kv_heads, stop - start, TINY.head_dim)
    pool.write_rows(TABLE, start, rows)
    assert torch.equal(pool.read_rows(TABLE, start, stop), rows)
    for first, last in ((0, start), (stop, 192)):
        assert torch.equal(pool.read_rows(TABLE, first, last), before.read_rows(TABLE, first, last))
    others = [0, 2, 3, 4, 6]
    assert torch.equal(pool.k[:, others], before.k[:, others])


def test_copy_block_copies_all_planes() -> None:
    pool = _pool()
    pool.copy_block(5, 2)
    assert torch.equal(pool.k[:, 2], pool.k[:, 5])
    assert torch.equal(pool.v[:, 2], pool.v[:, 5])


def test_bytes() -> None:
    pool = _pool()
    assert pool.block_bytes * 8 == pool.k.nbytes + pool.v.nbytes
    assert pool.row_bytes * 64 == pool.block_bytes


def test_rows_outside_the_table_are_refused() -> None:
    pool = _pool()
    for start, stop in ((0, 193), (-1, 2), (5, 4)):
        with pytest.raises(EngineFault, match="outside a table"):
            pool.read_rows(TABLE, start, stop)
    with pytest.raises(EngineFault, match="outside a table"):
        pool.write_rows(TABLE, 190, torch.zeros(2, TINY.planes, TINY.kv_heads, 3, TINY.head_dim))


def test_copies_that_lie_side_by_side_come_back_in_their_places() -> None:
    """In any order, from one slab and from elsewhere, more than are staged at once."""
    count = 40
    pool = KVPool(TINY, count)
    generator = torch.Generator().manual_seed(5)
    pool.k.normal_(generator=generator)
    pool.v.normal_(generator=generator)
    expected = [pool.read_block(block) for block in range(count)]
    slab = torch.stack(expected[::-1])
    copies = [slab[count - 1 - block] if block % 7 else expected[block].clone() for block in range(count)]
    pool.k.zero_()
    pool.v.zero_()
    order = [(block * 17 + 3) % count for block in range(count)]
    pool.write_blocks(order, [copies[block] for block in order])
    assert all(torch.equal(pool.read_block(block), expected[block]) for block in range(count))
    assert pool.sums_of(order) == [checksum(expected[block]) for block in order]
