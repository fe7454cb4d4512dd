"""What one forward needs besides weights: pools, positions and index tensors, made once and read by every layer.

Two phases, chosen by the caller and never by a row count (C1.1): `PrefillStep` runs one sequence's rows in tiles of 64,
`DecodeStep` runs a few columns of several sequences. Both pad: a prefill to whole tiles, a decode to the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kernels.gated_delta import ReplayPlan
from kernels.paged_attention import AttentionPlan, QueryTile, WritePlan
from kernels.tiles import DECODE_COLUMNS, ROWS
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one sequence in a step: `count` real rows from absolute position `start`."""

    start: int
    count: int
    block_table: Sequence[int]
    window: int = 0
    """Keys that a row sees, itself among them; 0 = all before it."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The attention side of a step; rows are [sequences * columns], padding included."""

    kv: KVPool | RingPool
    cos_sin: Tensor
    """[sequences * columns, 2, rotary_dim / 2]."""
    sequences: int
    columns: int
    padded_columns: int
    """`columns` rounded up to whole query tiles."""
    plans: tuple[tuple[slice, AttentionPlan], ...]
    """Each with the query rows (of sequences * padded_columns) that it covers."""
    real_rows: Tensor | None
    """int64 rows that are no padding; None when all are real."""
    targets: Tensor
    """[real rows * kv_heads] int64 rows of a flattened KV plane."""
    prefill: bool = False
    """The phase, which picks the kernels' regime."""

    @property
    def writes(self) -> WritePlan:
        """Where keys and values go."""
        return WritePlan(self.cos_sin, self.targets, self.real_rows, self.plans[0][1].card)


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Rows of one slot from the grid on; the first `rows` are real."""

    attention: AttentionStep
    states: StatePool
    slot: int
    rows: int
    local: AttentionStep | None = None
    """The same rows for the sliding layers; null when there are none."""
    prefill: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Columns of several slots after their pending folds."""

    attention: AttentionStep
    states: StatePool
    replay: ReplayPlan
    local: AttentionStep | None = None
    """The same rows for the sliding layers; null when there are none."""
    prefill: ClassVar[bool] = False


Step = PrefillStep | DecodeStep


def prefill_attention(span: Span, kv: KVPool | RingPool, rope: Tensor) -> AttentionStep:
    """One sequence in tiles of 64 rows, one plan a tile, so that scratch memory grows with the context only."""
    rows = -(-span.count // ROWS) * ROWS
    plans = []
    for first in range(0, rows, ROWS):
        columns = min(ROWS, span.count - first)
        last = span.start + span.count - 1
        tile = QueryTile(span.start + first, columns, last, span.block_table, span.window)
        plans.append((slice(first, first + ROWS), AttentionPlan.build([tile], ROWS, kv.kv_heads)))
    return replace(_attention([span], rows, rows, tuple(plans), kv, rope), prefill=True)


def decode_attention(spans: Sequence[Span], kv: KVPool | RingPool, rope: Tensor) -> AttentionStep:
    """Several sequences in tiles of `DECODE_COLUMNS` columns, all in one plan."""
    columns = max(span.count for span in spans)
    padded = -(-columns // DECODE_COLUMNS) * DECODE_COLUMNS
    tiles = [
        QueryTile(
            span.start + first,
            max(1, min(DECODE_COLUMNS, span.count - first)),
            span.start + span.count - 1,
            span.block_table,
            span.window,
        )
        if first < span.count
        else QueryTile(span.start, 1, span.start + span.count - 1, span.block_table, span.window)
        for span in spans
        for first in range(0, padded, DECODE_COLUMNS)
    ]
    plan = AttentionPlan.build(tiles, DECODE_COLUMNS, kv.kv_heads)
    return _attention(spans, columns, padded, ((slice(0, len(spans) * padded), plan),), kv, rope)


def _attention(
    spans: Sequence[Span],
    columns: int,
    padded: int,
    plans: tuple[tuple[slice, AttentionPlan], ...],
    kv: KVPool | RingPool,
    rope: Tensor,
) -> AttentionStep:
    offsets = torch.arange(columns)
    positions = torch.tensor([span.start for span in spans])[:, None] + offsets
    counts = torch.tensor([span.count for span in spans])
    ragged = any(span.count != columns for span in spans)
    real = (offsets < counts[:, None]).flatten().nonzero().flatten() if ragged else None
    return AttentionStep(
        kv=kv,
        cos_sin=rope.index_select(0, positions.flatten().clamp_(max=rope.shape[0] - 1)),
        sequences=len(spans),
        columns=columns,
        padded_columns=padded,
        plans=plans,
        real_rows=real,
        targets=torch.cat([_targets(span, kv.kv_heads) for span in spans])
        if len(spans) > 1
        else _targets(spans[0], kv.kv_heads),
    )


def _targets(span: Span, kv_heads: int) -> Tensor:
    """Rows of a flattened KV plane [blocks * kv_heads * 64] that the span's rows are written to, row by row."""
    first, last = span.start // ROWS, (span.start + span.count - 1) // ROWS
    blocks = torch.tensor(span.block_table[first : last + 1], dtype=torch.int64)
    positions = torch.arange(span.start, span.start + span.count)
    base = blocks[positions // ROWS - first] * (kv_heads * ROWS) + positions % ROWS
    return (base[:, None] + torch.arange(0, kv_heads * ROWS, ROWS)).flatten()
