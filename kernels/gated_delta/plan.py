"""Dimensions of the delta rule and the index tensors of one replay step, made once a forward and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads and widths. A packed row holds q, k (each [key_heads, key_dim]), v, then beta and g a value head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Elements of q, k and v together: the channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def packed(self) -> int:
        """Elements of a packed row."""
        return self.channels + 2 * self.value_heads


class MixWeights(Protocol):
    """What turns a projected row into a packed one, all float32."""

    @property
    def conv(self) -> Tensor:
        """[K, channels] taps, the oldest input first."""

    @property
    def rate(self) -> Tensor:
        """[value_heads] exp(A_log)."""

    @property
    def dt_bias(self) -> Tensor:
        """[value_heads]."""


@dataclass(frozen=True, slots=True)
class CardReplay:
    """A step as a captured graph reads it: int32 [S] tensors at fixed addresses, filled before every launch.

    A slot's kept rows are a ring of `store.shape[1]` rows, in `store` [slots, ring, packed] and `windows`
    [slots, ring, channels] alike. Pending row i is ring row head + i, new row t is head + pending + t, and the conv's
    inputs before the pending rows are the K - 1 ring rows before head: all modulo the ring, which therefore has room for
    K - 1 + pending + columns rows. Where a row of `store` had v it has its correction once it has run: that is what pending
    rows hold. A padded sequence has count 0, pending 0 and a slot that no one reads.
    """

    slots: Tensor
    """Distinct, but for padding."""
    pending: Tensor
    """Accepted rows that the state does not hold yet."""
    head: Tensor
    store_after: Tensor
    """1: write the state after the pending rows. The host then moves head by pending, which becomes 0."""
    counts: Tensor
    """Real new rows, at most `columns`; o of the others is zero."""
    columns: int


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Which rows of the replay store to fold and where the new rows go.

    On a card `card` says it all and the rest is empty. For the twin, the store of a layer is [slots * capacity + 1,
    packed]; its last row is all zeros and stands for "no row": a step with k = v = 0, beta = 0, g = 0 leaves a state
    as it is. Folds are padded with it at the front.
    """

    slots: Tensor
    """[B] int64, distinct."""
    fold_steps: int
    """Longest fold of the batch."""
    fold_rows: Tensor
    """[B * fold_steps] int64 rows of the store."""
    save_rows: Tensor
    """[B * T] int64 rows of the store that the new rows are kept in; T may be 0."""
    history: Tensor
    """[B * (K - 1)] int64 rows of the flattened conv windows [slots * (K - 1 + capacity), channels] before the new ones."""
    card: CardReplay | None = None

    @classmethod
    def for_card(cls, card: CardReplay) -> ReplayPlan:
        """The plan of a launch on a card."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(slots=card.slots, fold_steps=0, fold_rows=none, save_rows=none, history=none, card=card)

    @classmethod
    def build(
        cls,
        slots: Sequence[int],
        folds: Sequence[int],
        new_rows: int,
        capacity: int,
        num_slots: int,
        taps: int = 0,
    ) -> ReplayPlan:
        """Plan for `slots`, whose last verify had `folds` accepted rows, and `new_rows` columns (padded) each.

        `taps` = K - 1 of the convolution; 0 when the plan serves no `decode`.
        """
        steps = max(folds)
        nothing = num_slots * capacity
        fold_rows = [
            slot * capacity + step - (steps - fold) if step >= steps - fold else nothing
            for slot, fold in zip(slots, folds, strict=True)
            for step in range(steps)
        ]
        save_rows = [slot * capacity + t for slot in slots for t in range(new_rows)]
        window = taps + capacity
        history = [
            slot * window + fold + j for slot, fold in zip(slots, folds, strict=True) for j in range(taps)
        ]
        return cls(
            slots=torch.tensor(slots, dtype=torch.int64),
            fold_steps=steps,
            fold_rows=torch.tensor(fold_rows, dtype=torch.int64),
            save_rows=torch.tensor(save_rows, dtype=torch.int64),
            history=torch.tensor(history, dtype=torch.int64),
        )
