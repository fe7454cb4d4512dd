"""What every kind of attention layer does with its plane of a paged pool, once the rows of a step are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels import activation, paged_attention
from kernels.paged_attention import AttentionPlan
from services.gpu_worker.engine.layers.steps import AttentionStep


def attend(plane: int, query: Tensor, at: AttentionStep, gate: Tensor | None = None) -> Tensor:
    """[M, heads, head_dim], scaled already -> [M, heads * head_dim], through whole query tiles; times the sigmoid of
    `gate` [M, heads * head_dim] if there is one."""
    keys, values = at.kv.k[plane], at.kv.v[plane]
    if _is_whole(at):
        return paged_attention.attend(query, keys, values, at.plans[0][1], gate).flatten(1)
    out = _tiled(query, at, lambda part, plan: paged_attention.attend(part, keys, values, plan)).flatten(1)
    return out if gate is None else activation.sigmoid_gate(out, gate)


def attend_latent(plane: int, query: Tensor, at: AttentionStep, rank: int) -> Tensor:
    """[M, heads, width of a latent row], scaled already -> [M, heads, rank], through whole query tiles."""
    rows = at.kv.k[plane]
    if _is_whole(at):
        return paged_attention.attend_latent(query, rows, at.plans[0][1], rank)
    return _tiled(query, at, lambda part, plan: paged_attention.attend_latent(part, rows, plan, rank))


def narrowed(plane: int, query: Tensor, weights: Tensor, at: AttentionStep, most: int) -> AttentionStep:
    """The step in which each row sees no more than `most` keys: query [M, heads, d] and weights [M, heads] of sparse
    attention's index, whose keys are the last d elements of the plane's rows."""
    keys = at.kv.k[plane][..., -query.shape[2] :]
    if _is_whole(at):
        where, plan = at.plans[0]
        return replace(at, plans=((where, paged_attention.narrowed(query, weights, keys, plan, most)),))
    flat = _tiles(torch.cat([query, weights[..., None]], dim=-1), at)
    plans = tuple(
        (where, paged_attention.narrowed(flat[where][..., :-1], flat[where][..., -1], keys, plan, most))
        for where, plan in at.plans
    )
    return replace(at, plans=plans)


def _is_whole(at: AttentionStep) -> bool:
    """Whether one plan covers the rows as they lie."""
    return at.padded_columns == at.columns and len(at.plans) == 1


def _tiled(query: Tensor, at: AttentionStep, kernel: Callable[[Tensor, AttentionPlan], Tensor]) -> Tensor:
    """The kernel over padded columns, one plan after the other; [M, heads, width of its answer]."""
    rows, heads, _ = query.shape
    flat = _tiles(query, at)
    parts = [kernel(flat[where], plan) for where, plan in at.plans]
    out = parts[0].new_empty(len(flat), heads, parts[0].shape[2])
    for (where, _), part in zip(at.plans, parts, strict=True):
        out[where] = part
    return out.view(at.sequences, at.padded_columns, heads, -1)[:, : at.columns].reshape(rows, heads, -1)


def _tiles(rows: Tensor, at: AttentionStep) -> Tensor:
    """[M, heads, width] -> [sequences * padded columns, heads, width], zeros between."""
    tiled = rows.new_zeros(at.sequences, at.padded_columns, *rows.shape[1:])
    tiled[:, : at.columns] = rows.view(at.sequences, at.columns, *rows.shape[1:])
    return tiled.flatten(0, 1)
