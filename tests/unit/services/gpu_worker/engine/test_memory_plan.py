"""How a card's memory is divided at start: nothing is promised twice, and what cannot fit is said before it is tried."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import FULL, SLIDING, EngineConfig
from services.gpu_worker.engine.memory import _state_bytes, fitted, plan
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.block_ring import draft_elements
from services.gpu_worker.engine.models.random import TINY
from services.gpu_worker.engine.placement import CPU, Placement
from shared.errors import EngineFault
from tests.block_kit import drafter_of
from tests.engine_kit import tiny_model

CARD = Placement(device=torch.device("cpu"), dtype=torch.bfloat16, on_card=True, fold_rows=4, recipe="card")
CONFIG = EngineConfig(
    num_blocks=0, num_slots=3, num_snapshots=2, max_batch=3, max_verify=4, max_context=1024, device="cuda"
)
GIB = 1 << 30


@settings(deadline=None, max_examples=40)
@given(free=st.integers(2 * GIB, 64 * GIB), slots=st.integers(1, 64), snapshots=st.integers(0, 64))
def test_no_byte_is_promised_twice(free: int, slots: int, snapshots: int) -> None:
    config = replace(CONFIG, num_slots=slots, max_batch=slots, num_snapshots=snapshots)
    try:
        made = plan(TINY, CARD, config, free=free, total=80 * GIB, weights=GIB)
    except EngineFault:
        return
    assert made.wanted <= free
    assert made.parts["kv"] == made.num_blocks * KVPool(TINY, 1, CARD).block_bytes
    assert made.num_blocks * 64 >= config.max_context


def test_states_are_counted_as_the_pool_lays_them_out() -> None:
    pool = StatePool(TINY, 3, 2, 4, CARD)
    tensors = (pool.state, pool.windows, pool.store, pool._snapshot_state, pool._snapshot_windows)
    assert _state_bytes(TINY, CARD, CONFIG) == sum(one.numel() * one.element_size() for one in tensors)


def test_rings_are_counted_as_their_pool_lays_them_out() -> None:
    dims = replace(TINY, layer_types=(SLIDING, FULL, SLIDING), window=100)
    pool = RingPool(dims, 3, 2, prefill_rows=CONFIG.prefill_chunk, max_verify=4, dtype=CARD.dtype)
    made = plan(dims, CARD, CONFIG, free=8 * GIB, total=80 * GIB, weights=GIB)
    assert made.parts["rings"] == 3 * pool.ring_bytes + 2 * pool.tail_bytes > 0
    all_slide = replace(dims, layer_types=(SLIDING,), has_mtp=False)
    assert plan(all_slide, CARD, CONFIG, free=8 * GIB, total=80 * GIB, weights=GIB).num_blocks == 3 * 16


def test_a_block_drafters_rings_and_tails_are_counted_as_they_lie() -> None:
    target = tiny_model()
    drafter = drafter_of(target)
    context = BlockContext(drafter, target.model, num_slots=3, num_snapshots=2)
    tensors = (context.ring.k, context.ring.v, context.ring._tails)
    assert draft_elements(drafter.dims, 3, 2) == sum(one.numel() for one in tensors)
    bare, with_it = (
        plan(TINY, CARD, CONFIG, free=8 * GIB, total=80 * GIB, weights=GIB, drafter=one)
        for one in (None, drafter.dims)
    )
    gathered = draft_elements(drafter.dims, 3, 2, gathered=CONFIG.max_batch) * CARD.dtype.itemsize
    assert with_it.parts["rings"] - bare.parts["rings"] == gathered


def test_what_does_not_fit_is_said_with_the_figures() -> None:
    with pytest.raises(EngineFault, match="blocks of KV"):
        plan(TINY, CARD, replace(CONFIG, num_blocks=10**7), free=8 * GIB, total=80 * GIB, weights=GIB)
    with pytest.raises(EngineFault, match="one sequence needs 16"):
        plan(TINY, CARD, CONFIG, free=GIB, total=80 * GIB, weights=GIB)


def test_the_table_names_every_part() -> None:
    made = plan(TINY, CARD, CONFIG, free=8 * GIB, total=80 * GIB, weights=GIB)
    assert [line.split()[0] for line in made.lines()] == [*made.parts, "left"]


def test_on_the_cpu_the_number_of_blocks_is_the_settings() -> None:
    config = replace(CONFIG, num_blocks=16, device="cpu")
    assert fitted(config, TINY, CPU) == (config, None)
    with pytest.raises(EngineFault, match="name a number"):
        fitted(CONFIG, TINY, CPU)
