"""Attention of query tiles over paged KV, float32.

Per tile: scores against every split of 64 keys, the maximum over all of them, exponentials, and then the partial sums of
the splits added in ascending order. A hidden key has score -1e30 and weight exactly 0, so a row's bits do not depend on
the rows, columns or sequences beside it, nor on how far past it the KV is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activation.reference import sigmoid_gate
from kernels.norm_rope.reference import qk_norm_rope, qk_rope
from kernels.paged_attention.plan import AttentionPlan, WritePlan
from kernels.tiles import ROWS

_HIDDEN = -1e30
"""Finite, so that a wholly hidden split of a padding row makes no NaN; its exponential underflows to 0."""


def write_rows(pool: Tensor, rows: Tensor, targets: Tensor) -> None:
    """Write new keys or values: pool [blocks, kv_heads, 64, d]; rows [M, kv_heads, d];
    targets [M * kv_heads] int64, rows of the flattened pool."""
    pool.view(-1, pool.shape[-1]).index_copy_(0, targets, rows.reshape(-1, rows.shape[-1]))


def write_latent(rows: Tensor, plane: Tensor, plan: WritePlan) -> None:
    """rows [M, d], padding among them, into one plane [blocks, 1, 64, d]."""
    real = rows if plan.real_rows is None else rows.index_select(0, plan.real_rows)
    write_rows(plane, real, plan.targets)


def qk_norm_rope_write(
    y: Tensor, scale: Tensor, keys: Tensor, values: Tensor, plan: WritePlan, eps: float | None
) -> Tensor:
    """Norm (not with `eps` null) and turn queries and keys, write keys and values into their pages.

    y [M, ...] rows [q heads | k heads | anything | v heads] of a projection; scale [heads + kv_heads, d] float32: the
    norms' factors, for queries times the softmax scale; keys, values one plane [blocks, kv_heads, 64, d] -> query
    [M, heads, d].
    """
    rows, kv_heads, width = y.shape[0], keys.shape[1], keys.shape[3]
    heads = scale.shape[0] - kv_heads
    turned, value_at = (heads + kv_heads) * width, y.shape[1] - kv_heads * width
    parts = y[:, :turned].reshape(rows, -1, width)
    if eps is None:
        both = qk_rope(parts, scale, plan.cos_sin)
    else:
        both = qk_norm_rope(parts, scale, plan.cos_sin, eps)
    fresh = both[:, heads:], y[:, value_at:].view(rows, kv_heads, width)
    for pool, part in zip((keys, values), fresh, strict=True):
        write_rows(
            pool, part if plan.real_rows is None else part.index_select(0, plan.real_rows), plan.targets
        )
    return both[:, :heads]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, gate: Tensor | None = None
) -> Tensor:
    """query [tiles * tile_rows, heads, d], scaled already; keys, values [blocks, kv_heads, 64, d] -> like query.

    With a `gate` [rows, heads * d], which may be columns of wider rows, the result is multiplied by its sigmoid.
    """
    out = _attend(query, keys, values, plan)
    return out if gate is None else sigmoid_gate(out, gate.unflatten(1, query.shape[1:]))


def attend_latent(query: Tensor, plane: Tensor, plan: AttentionPlan, rank: int) -> Tensor:
    """query [tiles * tile_rows, heads, d], scaled already; plane [blocks, 1, 64, d or more], a row's first d elements being the
    key of every head and its first `rank` the value -> [tiles * tile_rows, heads, rank]."""
    rows = plane[..., : query.shape[2]]
    return _attend(query, rows, rows, plan)[..., :rank]


def _attend(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
    kv_heads, width = keys.shape[1], keys.shape[3]
    group = query.shape[1] // kv_heads
    tall = plan.tile_rows * group
    tiles = query.view(plan.tiles, plan.tile_rows, kv_heads, group, width).transpose(1, 2)
    tiles = tiles.reshape(plan.tiles, kv_heads, tall, width)
    items = plan.blocks.shape[0]
    gathered = values.index_select(0, plan.blocks)
    if plan.stale is not None:
        gathered.view(-1, width).index_fill_(0, plan.stale, 0.0)

    wide = _of_items(tiles, plan).view(items * kv_heads, tall, width)
    scores = torch.bmm(wide, keys.index_select(0, plan.blocks).view(-1, ROWS, width).transpose(1, 2))
    scores.view(items, kv_heads, plan.tile_rows, group, ROWS).masked_fill_(plan.hidden, _HIDDEN)
    peak = _of_items(_peak(scores.view(items, kv_heads, tall, ROWS).amax(-1), plan), plan)
    weights = scores.sub_(peak.view(items * kv_heads, tall, 1)).exp_()
    partial = torch.bmm(weights, gathered.view(-1, ROWS, width))

    total = _add_splits(weights.sum(-1).view(items, -1), plan).view(plan.tiles, kv_heads, tall, 1)
    out = _add_splits(partial.view(items, -1), plan).view(plan.tiles, kv_heads, tall, width).div_(total)
    out = out.view(plan.tiles, kv_heads, plan.tile_rows, group, width).transpose(1, 2)
    return out.reshape(query.shape)


def _of_items(per_tile: Tensor, plan: AttentionPlan) -> Tensor:
    """[tiles, ...] -> [items, ...], contiguous."""
    return per_tile.index_select(0, plan.tile_of)


def _peak(peaks: Tensor, plan: AttentionPlan) -> Tensor:
    """Maximum over a tile's splits: [items, ...] -> [tiles, ...]. A maximum has the same bits in any order."""
    if plan.tiles == 1:
        return peaks.amax(0, keepdim=True)
    dense = peaks.new_full((plan.tiles, plan.max_splits, *peaks.shape[1:]), _HIDDEN)
    dense[plan.tile_of, plan.split_of] = peaks
    return dense.amax(1)


def _add_splits(partial: Tensor, plan: AttentionPlan) -> Tensor:
    """[items, n] -> [tiles, n]: `index_add_` walks the items in order, hence the splits of a tile in ascending order."""
    total = partial.new_zeros(plan.tiles, partial.shape[1])
    return total.index_add_(0, plan.tile_of, partial)
