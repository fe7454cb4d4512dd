"""Paged attention on a card; the twins in `reference` define what is computed, up to rounding.

The regime is the plan's: a prefill runs unsplit, decode and verify in splits of 256 keys (`CardAttention.prefill`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.paged_attention import card_chosen, card_latent, card_prefill, card_rows, card_splits, card_write
from kernels.paged_attention.plan import AttentionPlan, CardAttention, WritePlan


def qk_norm_rope_write(
    y: Tensor, scale: Tensor, keys: Tensor, values: Tensor, plan: WritePlan, eps: float | None
) -> Tensor:
    """See the twin; rows that are padding write nothing, and their queries hold anything."""
    return card_write.write(y, scale, plan.cos_sin, keys, values, _card(plan.card), eps)


def write_latent(rows: Tensor, plane: Tensor, plan: WritePlan) -> None:
    """See the twin; rows that are padding write nothing."""
    card_rows.write(rows, plane, _card(plan.card))


def attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, gate: Tensor | None = None
) -> Tensor:
    """See the twin; query [S * columns, heads, d], rows that are padding are answered as zeros."""
    card = _card(plan.card)
    regime = card_prefill if card.prefill else card_splits
    return regime.attend(query, keys, values, card, gate)


def attend_latent(query: Tensor, plane: Tensor, plan: AttentionPlan, rank: int) -> Tensor:
    """See the twin; rows that are padding are answered as zeros."""
    return card_latent.attend(query, plane, _card(plan.card), rank)


def narrowed(query: Tensor, weights: Tensor, keys: Tensor, plan: AttentionPlan, most: int) -> AttentionPlan:
    """See `chosen.narrowed`."""
    _card(plan.card)
    return card_chosen.narrowed(query, weights, keys, plan, most)


def check_latent(rank: int, rope: int, row: int, dtype: torch.dtype) -> None:
    """ValueError for latent rows that `attend_latent` cannot read: `row` elements, of which `rank` are key and value."""
    card_latent.check(rank, rope, row, dtype)


def _card(card: CardAttention | None) -> CardAttention:
    if card is None:
        raise ValueError("a launch on a card needs a plan of fixed addresses (AttentionPlan.for_card)")
    return card
