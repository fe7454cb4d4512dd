"""Index tensors of a step: which rows go where, and how padding is kept out."""

from __future__ import annotations

import torch

from kernels.norm_rope import rope_table
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.layers.steps import Span, decode_attention, prefill_attention
from services.gpu_worker.engine.models.random import TINY

ROPE = rope_table(TINY.rotary_dim, TINY.rope_theta, 256)


def _pool() -> KVPool:
    return KVPool(TINY, 8)


def _written(targets: torch.Tensor) -> list[tuple[int, int, int]]:
    """(block, head, offset) of each target."""
    return [(t // (TINY.kv_heads * 64), t // 64 % TINY.kv_heads, t % 64) for t in targets.tolist()]


def test_ragged_columns_are_padded_and_never_written() -> None:
    step = decode_attention([Span(62, 3, [5, 2]), Span(10, 1, [7])], _pool(), ROPE)
    assert (step.sequences, step.columns, step.padded_columns) == (2, 3, 8)
    assert step.real_rows is not None
    assert step.real_rows.tolist() == [0, 1, 2, 3]
    rows = [(5, 62), (5, 63), (2, 0), (7, 10)]
    assert _written(step.targets) == [
        (block, head, offset) for block, offset in rows for head in range(TINY.kv_heads)
    ]
    assert torch.equal(step.cos_sin, ROPE[[62, 63, 64, 10, 11, 12]])


def test_equal_columns_need_no_selection() -> None:
    assert decode_attention([Span(0, 2, [0]), Span(5, 2, [1])], _pool(), ROPE).real_rows is None


def test_prefill_has_a_plan_a_tile_and_whole_tiles_of_rows() -> None:
    step = prefill_attention(Span(64, 100, [3, 1, 4]), _pool(), ROPE)
    assert (step.sequences, step.columns, len(step.plans)) == (1, 128, 2)
    assert [plan.blocks.tolist() for _, plan in step.plans] == [[3, 1], [3, 1, 4]]
    assert step.real_rows is not None
    assert len(step.real_rows) == 100
    assert {block for block, _, _ in _written(step.targets)} == {1, 4}


def test_positions_past_the_table_are_padding_only() -> None:
    step = decode_attention([Span(255, 1, [0, 1, 2, 3]), Span(0, 3, [4])], _pool(), ROPE)
    assert torch.equal(step.cos_sin[:3], ROPE[[255, 255, 255]])
