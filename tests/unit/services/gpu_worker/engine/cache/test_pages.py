"""Reference counts and exclusive ids."""

from __future__ import annotations

import pytest

from services.gpu_worker.engine.cache.pages import BlockAllocator, IdPool
from shared.errors import EngineFault


def test_a_block_is_free_again_when_its_last_reference_goes() -> None:
    blocks = BlockAllocator(4)
    taken = blocks.allocate(3)
    assert taken is not None
    blocks.retain(taken[:1])
    assert blocks.release(taken) == 2
    assert blocks.free == 3
    assert blocks.release(taken[:1]) == 1
    assert blocks.free == 4
    blocks.check()


def test_allocation_is_all_or_nothing() -> None:
    blocks = BlockAllocator(4)
    assert blocks.allocate(5) is None
    assert blocks.free == 4


def test_a_double_free_is_loud_and_changes_nothing() -> None:
    blocks = BlockAllocator(2)
    taken = blocks.allocate(2)
    assert taken is not None
    blocks.release(taken[1:])
    with pytest.raises(EngineFault):
        blocks.release(taken)
    assert blocks.refs(taken[0]) == 1
    with pytest.raises(EngineFault):
        blocks.retain(taken)
    assert blocks.refs(taken[0]) == 1


def test_ids_are_exclusive() -> None:
    pool = IdPool(2, "slot")
    first, second = pool.acquire(), pool.acquire()
    assert {first, second} == {0, 1}
    assert pool.acquire() is None
    assert first is not None
    pool.release(first)
    assert (pool.free, pool.held) == (1, 1)
    with pytest.raises(EngineFault, match="slot"):
        pool.release(first)
