"""The sigmoid router of DeepSeek's and GLM's mixtures, in torch for either device: every operation is a row's own.

    s = sigmoid(logits)                          what a chosen expert weighs
    c = s + bias                                 what is chosen by: the bias balances load and weighs nothing
    groups: only the `best_groups` groups with the largest sum of their two largest c can be chosen from
    the k largest c, largest first, ties by the smallest id; their s, divided by their sum if asked for, times `factor`

Source: transformers 5.24, `Glm4MoeLiteTopkRouter`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activation.reference import sigmoid
from kernels.experts.packed import Routes

_NOTHING = 1e-20
"""Added to the sum that divides, as the source does."""


def route_grouped(
    logits: Tensor,
    bias: Tensor,
    k: int,
    *,
    groups: int = 1,
    best_groups: int = 1,
    renormalise: bool = True,
    factor: float = 1.0,
) -> Routes:
    """float32 logits [M, E] and bias [E] -> the k experts of each row; E is a multiple of `groups`."""
    scores = sigmoid(logits)
    chosen_by = scores + bias
    if best_groups < groups:
        chosen_by = _in_best_groups(chosen_by, groups, best_groups)
    ids = chosen_by.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(dim=1, keepdim=True) + _NOTHING)
    return Routes(ids.int(), weights * factor)


def _in_best_groups(chosen_by: Tensor, groups: int, best_groups: int) -> Tensor:
    """The same, -inf outside of each row's best groups."""
    grouped = chosen_by.unflatten(1, (groups, -1))
    ranked = grouped.topk(2, dim=-1).values.sum(dim=-1).sort(dim=1, descending=True, stable=True).indices
    hidden = torch.ones_like(ranked, dtype=torch.bool).scatter_(1, ranked[:, :best_groups], False)
    return grouped.masked_fill(hidden[..., None], -torch.inf).flatten(1)
