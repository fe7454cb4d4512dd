"""Dimensions of the delta rule and the index tensors of one replay step, made once a forward and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Which rows of the replay store to fold and where the new rows go.

    The store of a layer is [slots * capacity + 1, packed]; its last row is all zeros and stands for "no row": a step
    with k = v = 0, beta = 0, g = 0 leaves a state as it is. Folds are padded with it at the front.
    """

    slots: Tensor
    """[B] int64, distinct."""
    fold_steps: int
    """Longest fold of the batch."""
    fold_rows: Tensor
    """[B * fold_steps] int64 rows of the store."""
    save_rows: Tensor
    """[B * T] int64 rows of the store that the new rows are kept in; T may be 0."""

    @classmethod
    def build(
        cls, slots: Sequence[int], folds: Sequence[int], new_rows: int, capacity: int, num_slots: int
    ) -> ReplayPlan:
        """Plan for `slots`, whose last verify had `folds` accepted rows, and `new_rows` columns (padded) each."""
        steps = max(folds)
        nothing = num_slots * capacity
        fold_rows = [
            slot * capacity + step - (steps - fold) if step >= steps - fold else nothing
            for slot, fold in zip(slots, folds, strict=True)
            for step in range(steps)
        ]
        save_rows = [slot * capacity + t for slot in slots for t in range(new_rows)]
        return cls(
            slots=torch.tensor(slots, dtype=torch.int64),
            fold_steps=steps,
            fold_rows=torch.tensor(fold_rows, dtype=torch.int64),
            save_rows=torch.tensor(save_rows, dtype=torch.int64),
        )
