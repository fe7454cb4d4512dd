"""Sparse attention's choice of keys, in torch on the CPU: which of the rows before it a row sees.

    score(t, s) = sum over index heads h, in order, of w_h(t) * max(0, q_h(t) . k(s))
    row t sees the `most` keys s <= t of largest score, ties by the smallest s

A tile's scores come from products of one shape, and a row is sorted alone, so a choice does not depend on the rows, columns
or sequences beside it. Source: transformers 5.24, `GlmMoeDsaIndexer`, whose ties are anybody's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.paged_attention.plan import AttentionPlan
from kernels.tiles import ROWS


def narrowed(query: Tensor, weights: Tensor, keys: Tensor, plan: AttentionPlan, most: int) -> AttentionPlan:
    """The plan with all but each row's chosen keys hidden.

    query [tiles * tile_rows, heads, d], weights [tiles * tile_rows, heads], keys [blocks, 1, 64, d], a view of a plane.
    """
    if plan.max_splits * ROWS <= most:
        return plan
    scores = _scores(query, weights, keys, plan).masked_fill_(plan.hidden[:, 0, :, 0], -torch.inf)
    dense = scores.new_full((plan.tiles, plan.max_splits, plan.tile_rows, ROWS), -torch.inf)
    dense[plan.tile_of, plan.split_of] = scores
    rows = dense.transpose(1, 2).flatten(2).flatten(0, 1)
    best = rows.sort(dim=1, descending=True, stable=True).indices[:, :most]
    left = torch.ones_like(rows, dtype=torch.bool).scatter_(1, best, False)
    by_split = left.view(plan.tiles, plan.tile_rows, plan.max_splits, ROWS).transpose(1, 2)
    return replace(plan, hidden=plan.hidden | by_split[plan.tile_of, plan.split_of][:, None, :, None])


def _scores(query: Tensor, weights: Tensor, keys: Tensor, plan: AttentionPlan) -> Tensor:
    """[items, tile_rows, 64]."""
    heads, width = query.shape[1:]
    wide = query.reshape(plan.tiles, plan.tile_rows * heads, width).index_select(0, plan.tile_of)
    found = keys.index_select(0, plan.blocks).view(-1, ROWS, width).transpose(1, 2)
    each = torch.bmm(wide, found).relu_().view(-1, plan.tile_rows, heads, ROWS)
    share = weights.reshape(plan.tiles, plan.tile_rows, heads, 1).index_select(0, plan.tile_of)
    total = each[:, :, 0] * share[:, :, 0]
    for head in range(1, heads):
        total.add_(each[:, :, head] * share[:, :, head])
    return total
