"""The gated delta net on a card; the twins in `reference` define what is computed, up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gated_delta import card_chunk, card_mix, card_step
from kernels.gated_delta.plan import CardReplay, DeltaShape, MixWeights, ReplayPlan


def decode(
    y: Tensor,
    weights: MixWeights,
    state: Tensor,
    store: Tensor,
    windows: Tensor,
    plan: ReplayPlan,
    shape: DeltaShape,
    scale: Tensor,
) -> Tensor:
    """See the twin; `store` [slots, ring, packed] float32 and `windows` [slots, ring, channels] are rings of `plan.card`."""
    card = _card(plan)
    card_mix.mix(y, weights, store, windows, card, shape)
    out = torch.empty(y.shape[0], shape.value_heads, shape.value_dim, dtype=torch.float32, device=y.device)
    card_step.replay(state, store, out, card, shape)
    return out


def prefill(
    y: Tensor,
    weights: MixWeights,
    state: Tensor,
    window: Tensor,
    rows: int,
    shape: DeltaShape,
    scale: Tensor,
) -> Tensor:
    """See the twin."""
    return card_chunk.prefill_rows(y, weights, state, window, rows, shape)


def fold(state: Tensor, store: Tensor, plan: ReplayPlan, shape: DeltaShape, scale: Tensor) -> None:
    """See the twin; `plan.card` has no columns."""
    card = _card(plan)
    if card.columns:
        raise ValueError(f"a fold has no new rows, the plan has {card.columns} columns")
    card_step.replay(state, store, store, card, shape)


def _card(plan: ReplayPlan) -> CardReplay:
    if plan.card is None:
        raise ValueError("a launch on a card needs a plan of fixed addresses (ReplayPlan.for_card)")
    return plan.card
