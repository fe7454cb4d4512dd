"""A slot's life: only settled slots are copied, and a copy is the whole of a sequence's recurrent past."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.models.random import TINY
from shared.errors import EngineFault

SLOTS, SNAPSHOTS, COLUMNS = 3, 2, 8


def _pool() -> StatePool:
    return StatePool(TINY, SLOTS, SNAPSHOTS, COLUMNS)


def _scribble(pool: StatePool, slot: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool.state[:, slot].normal_(generator=generator)
    pool.windows[:, slot].normal_(generator=generator)


def test_a_restored_slot_is_the_slot_that_was_kept() -> None:
    pool = _pool()
    _scribble(pool, 0, 1)
    pool.advanced(0, 128)
    pool.take_snapshot(0, 1)
    kept = pool.digest(0)
    _scribble(pool, 0, 2)
    assert pool.digest(0) != kept
    pool.restore(1, 2)
    assert pool.digest(2) == kept
    assert pool.position(2) == 128


def test_digest_counts_position_states_and_windows() -> None:
    pool = _pool()
    digests = {pool.digest(0)}
    pool.advanced(0, 1)
    digests.add(pool.digest(0))
    pool.state[-1, 0, -1, -1, -1] = 1e-30
    digests.add(pool.digest(0))
    pool.windows[-1, 0, TINY.conv_kernel - 2, -1] = 1e-30
    digests.add(pool.digest(0))
    assert len(digests) == 4
    pool.windows[:, 0, TINY.conv_kernel - 1 :] = 5.0
    pool.state[0, 0, 0, 0, 0] = -0.0
    assert pool.digest(0) in digests


def test_reset_is_the_empty_state_whatever_was_pending() -> None:
    pool = _pool()
    empty = pool.digest(1)
    _scribble(pool, 1, 3)
    pool.verified(1, 4)
    pool.reset(1)
    assert pool.digest(1) == empty


def test_snapshot_bytes() -> None:
    pool = _pool()
    state = TINY.gdn_value_heads * TINY.gdn_key_dim * TINY.gdn_value_dim
    assert pool.snapshot_bytes == 4 * TINY.gdn_layers * (state + 3 * TINY.conv_channels)


def test_the_window_moves_by_the_accepted_rows() -> None:
    pool = _pool()
    _scribble(pool, 0, 4)
    window = pool.windows[:, 0].clone()
    pool.verified(0, 5)
    pool.accept(0, 2)
    pool.flushed(0)
    assert torch.equal(pool.windows[:, 0, :3], window[:, 2:5])
    assert pool.position(0) == 2


class SlotLife(RuleBasedStateMachine):
    """Any order of calls against a model of (position, fold, open) a slot; what the model forbids must raise."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = _pool()
        self.slots = [(0, 0, 0)] * SLOTS
        self.kept = [0] * SNAPSHOTS

    def _attempt(self, legal: bool, call: object) -> bool:
        if legal:
            call()  # type: ignore[operator]
        else:
            with pytest.raises(EngineFault):
                call()  # type: ignore[operator]
        return legal

    @rule(slot=st.integers(0, SLOTS - 1), rows=st.integers(1, 100))
    def prefill(self, slot: int, rows: int) -> None:
        position, fold, opened = self.slots[slot]
        if self._attempt(not fold and not opened, lambda: self.pool.advanced(slot, rows)):
            self.slots[slot] = (position + rows, 0, 0)

    @rule(slot=st.integers(0, SLOTS - 1), rows=st.integers(1, COLUMNS))
    def verify(self, slot: int, rows: int) -> None:
        position, fold, opened = self.slots[slot]
        if self._attempt(not opened, lambda: self.pool.verified(slot, rows)):
            self.slots[slot] = (position + fold, 0, rows)

    @rule(slot=st.integers(0, SLOTS - 1), rows=st.integers(-1, COLUMNS + 1))
    def accept(self, slot: int, rows: int) -> None:
        position, _, opened = self.slots[slot]
        legal = bool(opened) and 0 <= rows <= opened
        if self._attempt(legal, lambda: self.pool.accept(slot, rows)):
            self.slots[slot] = (position, rows, 0)

    @rule(slot=st.integers(0, SLOTS - 1))
    def flush(self, slot: int) -> None:
        position, fold, opened = self.slots[slot]
        if self._attempt(not opened, lambda: self.pool.flushed(slot)):
            self.slots[slot] = (position + fold, 0, 0)

    @rule(slot=st.integers(0, SLOTS - 1), snapshot=st.integers(0, SNAPSHOTS - 1))
    def take(self, slot: int, snapshot: int) -> None:
        position, fold, opened = self.slots[slot]
        if self._attempt(not fold and not opened, lambda: self.pool.take_snapshot(slot, snapshot)):
            self.kept[snapshot] = position

    @rule(slot=st.integers(0, SLOTS - 1), snapshot=st.integers(0, SNAPSHOTS - 1))
    def restore(self, slot: int, snapshot: int) -> None:
        _, fold, opened = self.slots[slot]
        if self._attempt(not fold and not opened, lambda: self.pool.restore(snapshot, slot)):
            self.slots[slot] = (self.kept[snapshot], 0, 0)

    @rule(slot=st.integers(0, SLOTS - 1))
    def reset(self, slot: int) -> None:
        self.pool.reset(slot)
        self.slots[slot] = (0, 0, 0)

    def teardown(self) -> None:
        for slot, (position, fold, opened) in enumerate(self.slots):
            assert self.pool.position(slot) == position
            if not opened:
                assert self.pool.fold(slot) == fold


TestSlotLife = SlotLife.TestCase
TestSlotLife.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
