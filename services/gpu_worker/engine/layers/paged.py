"""What every kind of attention layer does with its plane of a paged pool, once the rows of a step are written."""

from __future__ import annotations

from torch import Tensor

from kernels import activation, paged_attention
from services.gpu_worker.engine.layers.steps import AttentionStep


def attend(plane: int, query: Tensor, at: AttentionStep, gate: Tensor | None = None) -> Tensor:
    """[M, heads, head_dim], scaled already -> [M, heads * head_dim], through whole query tiles; times the sigmoid of
    `gate` [M, heads * head_dim] if there is one."""
    rows, heads, width = query.shape
    keys, values = at.kv.k[plane], at.kv.v[plane]
    if at.padded_columns == at.columns and len(at.plans) == 1:
        return paged_attention.attend(query, keys, values, at.plans[0][1], gate).view(rows, -1)
    tiled = query.new_zeros(at.sequences, at.padded_columns, heads, width)
    tiled[:, : at.columns] = query.view(at.sequences, at.columns, heads, width)
    flat = tiled.view(-1, heads, width)
    for where, plan in at.plans:
        flat[where] = paged_attention.attend(flat[where], keys, values, plan)
    out = tiled[:, : at.columns].reshape(rows, heads * width)
    return out if gate is None else activation.sigmoid_gate(out, gate)
