"""The rows of a step as the sliding layers see them: in the rings of the slots, turned by their own RoPE table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.layers.steps import (
    AttentionStep,
    Span,
    decode_attention,
    prefill_attention,
)


def local_prefill(span: Span, slot: int, ring: RingPool, rope: Tensor | None) -> AttentionStep | None:
    """See `prefill_attention`; null for a model without sliding layers."""
    return prefill_attention(_in_ring(span, slot, ring), ring, rope) if rope is not None else None


def local_decode(
    spans: Sequence[Span], slots: Sequence[int], ring: RingPool, rope: Tensor | None
) -> AttentionStep | None:
    """See `decode_attention`; `slots` hold the sequences of `spans`. Null for a model without sliding layers."""
    if rope is None:
        return None
    inside = [_in_ring(span, slot, ring) for span, slot in zip(spans, slots, strict=True)]
    return decode_attention(inside, ring, rope)


def _in_ring(span: Span, slot: int, ring: RingPool) -> Span:
    return replace(span, block_table=ring.table(slot), window=ring.window)
