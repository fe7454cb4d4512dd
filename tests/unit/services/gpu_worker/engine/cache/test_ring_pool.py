"""Rings: what is resident is what was written last, a tail is a copy, and no slot touches another's blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.config import BLOCK_ROWS, FULL, SLIDING
from services.gpu_worker.engine.models.random import TINY
from shared.errors import EngineFault

SLOTS, SNAPSHOTS, CHUNK, COLUMNS = 3, 2, 128, 8


def _pool(window: int = 100) -> RingPool:
    dims = replace(TINY, layer_types=(SLIDING, FULL, SLIDING), kv_heads=2, head_dim=2, window=window)
    return RingPool(dims, SLOTS, SNAPSHOTS, prefill_rows=CHUNK, max_verify=COLUMNS)


def _value(seed: int, position: int) -> float:
    """What a sequence has in its row: told apart from every other sequence's and row's."""
    return seed * 100_000.0 + position + 1.0


def _write(pool: RingPool, slot: int, seed: int, start: int, count: int) -> None:
    table = pool.table(slot)
    for position in range(start, start + count):
        block, row = table[position // BLOCK_ROWS], position % BLOCK_ROWS
        pool.k[:, block, :, row], pool.v[:, block, :, row] = _value(seed, position), -_value(seed, position)
    pool.wrote(slot, start + count)


def _tail(pool: RingPool, seed: int, position: int) -> Tensor:
    """What the tail at a position must be."""
    first = position - pool.tail_rows
    keys = torch.tensor([_value(seed, p) if p >= 0 else 0.0 for p in range(first, position)])
    return torch.stack([keys, -keys])[:, :, None, None, None].expand(2, pool.tail_rows, pool.planes, 2, 2)


@pytest.mark.parametrize("window", [1, 2, 64, 65, 100, 128, 1000])
def test_a_ring_holds_the_window_and_the_widest_launch(window: int) -> None:
    """Each row of a launch sees its window while all rows of the launch are written already."""
    pool = _pool(window)
    for start, count in [
        (0, CHUNK),
        (128, CHUNK),
        (640, CHUNK),
        (63, COLUMNS),
        (1000, COLUMNS),
        (1023, COLUMNS),
    ]:
        needed = range(max(0, start - window + 1) // BLOCK_ROWS, (start + count - 1) // BLOCK_ROWS + 1)
        table = pool.table(1)
        assert len({table[block] for block in needed}) == len(needed) <= pool.blocks_each


def test_memory_is_constant_in_the_length() -> None:
    pool = _pool()
    assert pool.blocks_each == 4
    assert pool.ring_bytes == 2 * 2 * 4 * BLOCK_ROWS * 2 * 2 * 4
    assert pool.tail_bytes == 2 * 2 * 99 * 2 * 2 * 4
    for length in (10, 10_000):
        assert {pool.table(2)[block] for block in range(-(-length // BLOCK_ROWS))} <= set(range(8, 12))


def test_a_model_without_windows_has_empty_rings() -> None:
    pool = RingPool(TINY, SLOTS, SNAPSHOTS, prefill_rows=CHUNK, max_verify=COLUMNS)
    pool.wrote(0, 300)
    pool.take(0, 1, 300)
    pool.restore(1, 2, 300)
    assert pool.is_resident(0, 300)
    assert pool.ring_bytes == pool.tail_bytes == pool.read(1).numel() == 0


def test_r_s14_a_position_is_resident_only_while_every_row_that_it_needs_is() -> None:
    pool = _pool()
    _write(pool, 0, 1, 0, 192)
    assert pool.is_resident(0, 192)
    assert pool.is_resident(0, 64)
    assert not pool.is_resident(0, 193)
    _write(pool, 0, 1, 192, 64)
    assert pool.is_resident(0, 64), "four blocks hold rows 0..255"
    _write(pool, 0, 1, 256, 1)
    assert not pool.is_resident(0, 64), "row 256 overwrote rows 0..63"
    assert not pool.is_resident(0, 162)
    assert pool.is_resident(0, 163)
    with pytest.raises(EngineFault, match="the window's rows before 162"):
        pool.take(0, 0, 162)
    pool.reset(0)
    assert pool.is_resident(0, 0)
    assert not pool.is_resident(0, 1)


def test_r_q25_a_block_that_was_overwritten_answers_null() -> None:
    pool = _pool()
    _write(pool, 2, 1, 0, 300)
    assert pool.first_block(2) == 1
    assert [pool.block_for(2, block) for block in range(6)] == [None, 9, 10, 11, 8, None]
    pool.take(2, 0, 300)
    pool.restore(0, 0, 300)
    assert [pool.block_for(0, block) for block in range(6)] == [None, None, None, 3, 0, None]


def test_a_rejected_draft_costs_the_rows_that_it_overwrote() -> None:
    """Rows 252..259 were verified, 252 alone accepted: block 4 is block 0's place, and 253 still has its window."""
    pool = _pool()
    _write(pool, 0, 1, 0, 252)
    _write(pool, 0, 1, 252, 8)
    pool.take(0, 0, 253)
    assert torch.equal(pool.read(0).view(2, 99, 2, 2, 2), _tail(pool, 1, 253))
    assert pool.first_block(0) == 1


def test_r_s10_a_tail_does_not_change_when_its_ring_goes_on() -> None:
    pool = _pool()
    _write(pool, 0, 1, 0, 128)
    pool.take(0, 1, 128)
    for start in range(128, 1024, 128):
        _write(pool, 0, 2, start, 128)
    assert torch.equal(pool.read(1).view(2, 99, 2, 2, 2), _tail(pool, 1, 128))


class Rings(RuleBasedStateMachine):
    """Slots that write, go back, are captured and restored, against the values that each sequence must have."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = _pool()
        self.pool.k.fill_(torch.nan)
        self.pool.v.fill_(torch.nan)
        self.lines: dict[int, tuple[int, int]] = {}
        """slot -> (seed, rows)"""
        self.kept: dict[int, tuple[int, int]] = {}
        """snapshot -> (seed, position)"""
        self.seed = 0

    @rule(slot=st.integers(0, SLOTS - 1))
    def begin(self, slot: int) -> None:
        self.seed += 1
        self.pool.reset(slot)
        self.lines[slot] = (self.seed, 0)

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), chunk=st.integers(1, CHUNK))
    def prefill(self, data: st.DataObject, chunk: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.lines)))
        seed, rows = self.lines[slot]
        if rows % BLOCK_ROWS == 0:
            _write(self.pool, slot, seed, rows, chunk)
            self.lines[slot] = (seed, rows + chunk)

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), columns=st.integers(1, COLUMNS))
    def verify(self, data: st.DataObject, columns: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.lines)))
        accepted = data.draw(st.integers(1, columns))
        seed, rows = self.lines[slot]
        _write(self.pool, slot, seed + 50, rows, columns)
        _write(self.pool, slot, seed, rows, accepted)
        self.lines[slot] = (seed, rows + accepted)

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), snapshot=st.integers(0, SNAPSHOTS - 1))
    def take(self, data: st.DataObject, snapshot: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.lines)))
        self.pool.take(slot, snapshot, self.lines[slot][1])
        self.kept[snapshot] = self.lines[slot]

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), slot=st.integers(0, SLOTS - 1), spilled=st.booleans())
    def restore(self, data: st.DataObject, slot: int, spilled: bool) -> None:
        snapshot = data.draw(st.sampled_from(sorted(self.kept)))
        if spilled:
            values = self.pool.read(snapshot).clone()
            self.pool.write(snapshot, torch.full_like(values, torch.nan))
            self.pool.write(snapshot, values)
        self.pool.restore(snapshot, slot, self.kept[snapshot][1])
        self.lines[slot] = self.kept[snapshot]

    @invariant()
    def every_sequence_sees_its_window(self) -> None:
        for slot, (seed, rows) in self.lines.items():
            assert self.pool.is_resident(slot, rows)
            assert torch.equal(self.pool.tail(slot, rows), _tail(self.pool, seed, rows))

    @invariant()
    def every_block_belongs_to_one_slot(self) -> None:
        tables = [self.pool.table(slot)[0 : self.pool.blocks_each] for slot in range(SLOTS)]
        assert sorted(block for table in tables for block in table) == list(range(self.pool.k.shape[1]))


Rings.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestRings = Rings.TestCase
