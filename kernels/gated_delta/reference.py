"""The gated delta rule in float32 (arXiv 2412.06464; the update of transformers' `torch_recurrent_gated_delta_rule`).

Per value head, state S [dk, dv], one row:

    S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q = (exp(g) S0)^T q + (k . q) d

q and k are l2-normalised, q also scaled by dk^-0.5; consecutive value heads share a key head. The last form of o lets one
product [q; k] @ S serve both reads. Rows arrive packed (`DeltaShape`): convolved q, k, v, then beta and g.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.activation.reference import delta_gates
from kernels.conv import reference as conv
from kernels.gated_delta.plan import DeltaShape, MixWeights, ReplayPlan
from kernels.norm_rope.reference import l2_norm
from kernels.tiles import ROWS


def qk_scale(shape: DeltaShape) -> Tensor:
    """[2, 1, 1] factors of `l2_norm` for (q, k): d^-0.5 of the norm, and the softmax-like d^-0.5 for q."""
    width = float(shape.key_dim)
    return torch.tensor([1.0 / width, width**-0.5])[:, None, None]


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
    """One layer's mixer between its two products: convolution, gates, packing, `replay_step`.

    y [B * T, packed or wider]: columns [q k v | b | a | ...] of the projection -> o [B * T, value_heads, dv]. `windows`
    is written like `state` and `store`.
    """
    columns = y.view(plan.slots.shape[0], -1, y.shape[-1])
    mixed = conv.update(windows, plan.history, plan.slots, columns[..., : shape.channels], weights.conv)
    packed = torch.cat([mixed, *_gates(columns, weights, shape)], dim=-1)
    out = replay_step(state, store, plan, packed, shape, scale)
    return out.reshape(-1, shape.value_heads, shape.value_dim)


def prefill(
    y: Tensor,
    weights: MixWeights,
    state: Tensor,
    window: Tensor,
    rows: int,
    shape: DeltaShape,
    scale: Tensor,
) -> Tensor:
    """The same for a prefill launch of one slot that starts on the grid, by chunks.

    y [n, ...], n a multiple of 64, of which `rows` are real; state [value_heads, dk, dv] and window [K - 1, channels] are
    advanced in place -> o [n, value_heads, dv].
    """
    mixed, tail = conv.prefill(window, y[:, : shape.channels], weights.conv, rows)
    window.copy_(tail)
    packed = torch.cat([mixed, *_gates(y, weights, shape)], dim=-1)
    return chunk_prefill(state, packed, rows, shape, scale)


def _gates(y: Tensor, weights: MixWeights, shape: DeltaShape) -> tuple[Tensor, Tensor]:
    first, heads = shape.channels, shape.value_heads
    b, a = y[..., first : first + heads], y[..., first + heads : first + 2 * heads]
    return delta_gates(b, a, weights.rate, weights.dt_bias)


def replay_step(
    state: Tensor, store: Tensor, plan: ReplayPlan, rows: Tensor, shape: DeltaShape, scale: Tensor
) -> Tensor:
    """Fold the accepted rows into the states (one write), then run the new rows without writing a state.

    state [slots, value_heads, dk, dv] and store [slots * capacity + 1, packed] are one layer's and are written at
    `plan.slots` and `plan.save_rows`; rows [B, T, packed]; scale from `qk_scale` -> o [B, T, value_heads, dv].
    One loop over fold and new rows: a row has the same bits as a new row and as a folded one.
    """
    batch, count, width = rows.shape
    steps = rows
    if plan.fold_steps:
        folded = store.index_select(0, plan.fold_rows).view(batch, plan.fold_steps, width)
        steps = torch.cat([folded, rows], dim=1)
    store.index_copy_(0, plan.save_rows, rows.reshape(batch * count, width))
    out = _advance(state, plan, steps, shape, scale)
    stacked = torch.stack(out).view(count, batch, shape.value_heads, shape.value_dim)
    return stacked.transpose(0, 1)


def fold(state: Tensor, store: Tensor, plan: ReplayPlan, shape: DeltaShape, scale: Tensor) -> None:
    """Only the first half of `replay_step`: fold the accepted rows into the states."""
    folded = store.index_select(0, plan.fold_rows).view(plan.slots.shape[0], plan.fold_steps, shape.packed)
    _advance(state, plan, folded, shape, scale)


def _advance(
    state: Tensor, plan: ReplayPlan, steps: Tensor, shape: DeltaShape, scale: Tensor
) -> list[Tensor]:
    """Run steps [B, F + T, packed] from the stored states; store the state after step F; outputs of the last T."""
    parts = _split(steps.transpose(0, 1), shape, scale)
    current = state.index_select(0, plan.slots).view(-1, shape.key_dim, shape.value_dim)
    last = steps.shape[1] - 1
    out = []
    for step, (reads, column, value, decay, beta, match) in enumerate(parts):
        if step == plan.fold_steps and step:
            _store(state, plan.slots, current)
        query_read, key_read = torch.bmm(reads, current).unbind(1)
        delta = torch.sub(value, key_read).mul_(beta)
        if step >= plan.fold_steps:
            out.append(torch.addcmul(query_read, match, delta))
            if step == last:
                return out
        current = torch.addcmul(current * decay, column, delta.unsqueeze(1))
    _store(state, plan.slots, current)
    return out


def _store(state: Tensor, slots: Tensor, current: Tensor) -> None:
    if slots.shape[0] == 1:
        state[int(slots)] = current
    else:
        state.index_copy_(0, slots, current.view(-1, *state.shape[1:]))


def _split(steps: Tensor, shape: DeltaShape, scale: Tensor) -> zip:
    """Steps [F + T, B, packed] -> per step, with N = B * value_heads: reads [N, 2, dk] (decayed q and k), k as a column
    [N, dk, 1], v [N, dv], decay [N, 1, 1], beta [N, 1], k . q [N, 1]."""
    count, batch, _ = steps.shape
    heads, keys = shape.value_heads, 2 * shape.key_heads * shape.key_dim
    both = steps[..., :keys].reshape(count, batch, 2, shape.key_heads, shape.key_dim)
    both = l2_norm(both, scale)
    match = (both[:, :, 0] * both[:, :, 1]).sum(-1)
    repeat = heads // shape.key_heads
    pairs = both.transpose(2, 3)[:, :, :, None].expand(-1, -1, -1, repeat, -1, -1)
    pairs = pairs.reshape(count, batch * heads, 2, shape.key_dim)
    decay = steps[..., shape.channels + heads :].exp().reshape(count, batch * heads, 1, 1)
    return zip(
        (pairs * decay).unbind(0),
        pairs[:, :, 1].unsqueeze(-1).unbind(0),
        steps[..., keys : shape.channels].reshape(count, batch * heads, shape.value_dim).unbind(0),
        decay.unbind(0),
        steps[..., shape.channels : shape.channels + heads].reshape(count, batch * heads, 1).unbind(0),
        match[..., None].expand(-1, -1, -1, repeat).reshape(count, batch * heads, 1).unbind(0),
        strict=True,
    )


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Intra-chunk terms, each [chunks, value_heads, 64, ...]."""

    query: Tensor
    """q e^G."""
    key: Tensor
    """(k e^(G_last - G)) transposed: [.., dk, 64]."""
    attention: Tensor
    """tril(q k^T e^(G_i - G_j)): [.., 64, 64]."""
    value: Tensor
    """U = (I + A)^-1 beta v."""
    read: Tensor
    """W = (I + A)^-1 beta e^G k."""
    decay: Tensor
    """e^(G_last): [.., 1, 1]."""


def chunk_prefill(state: Tensor, rows: Tensor, valid: int, shape: DeltaShape, scale: Tensor) -> Tensor:
    """Run a prefill launch that starts on the grid: state [value_heads, dk, dv] is advanced in place.

    rows [n, packed], n a multiple of 64; rows from `valid` on are zeroed here, which leaves the state as it is.
    Returns o [n, value_heads, dv]. Per chunk (algorithm of arXiv 2406.06484 with decay):
    V' = U - W S;  O = (q e^G) S + tril(q k^T e^(G_i - G_j)) V';  S <- e^(G_last) S + (k e^(G_last - G))^T V'.
    """
    rows[valid:] = 0.0
    chunks = _intra(rows, shape, scale)
    out = torch.empty(rows.shape[0] // ROWS, shape.value_heads, ROWS, shape.value_dim)
    current = state
    for i in range(out.shape[0]):
        fresh = torch.baddbmm(chunks.value[i], chunks.read[i], current, alpha=-1.0)
        torch.baddbmm(torch.bmm(chunks.query[i], current), chunks.attention[i], fresh, out=out[i])
        current = torch.baddbmm(current * chunks.decay[i], chunks.key[i], fresh)
    state.copy_(current)
    return out.transpose(1, 2).reshape(rows.shape[0], shape.value_heads, shape.value_dim)


def _intra(rows: Tensor, shape: DeltaShape, scale: Tensor) -> _Chunks:
    """All that does not need the state, for all chunks and heads at once."""
    chunks, heads, keys = rows.shape[0] // ROWS, shape.value_heads, 2 * shape.key_heads * shape.key_dim
    both = l2_norm(rows[:, :keys].reshape(-1, 2, shape.key_heads, shape.key_dim), scale)
    both = both.view(chunks, ROWS, 2, shape.key_heads, shape.key_dim).permute(2, 0, 3, 1, 4)[:, :, :, None]
    both = both.expand(-1, -1, -1, heads // shape.key_heads, -1, -1)
    query, key = both.reshape(2, chunks, heads, ROWS, shape.key_dim).unbind(0)
    value = _heads_first(rows[:, keys : shape.channels], chunks, heads)
    beta = _heads_first(rows[:, shape.channels : shape.channels + heads], chunks, heads)
    total = _heads_first(rows[:, shape.channels + heads :], chunks, heads).squeeze(-1).cumsum(-1)

    upper = torch.ones(ROWS, ROWS, dtype=torch.bool).triu_(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill_(upper, -torch.inf).exp_()
    grown = total.exp()[..., None]
    key_beta = key * beta
    system = torch.matmul(key_beta, key.transpose(-1, -2)).mul_(decay)
    right = torch.cat([value * beta, key_beta * grown], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    last = total[..., -1:]
    return _Chunks(
        query=query * grown,
        key=(key * (last - total).exp_()[..., None]).transpose(-1, -2).contiguous(),
        attention=torch.matmul(query, key.transpose(-1, -2)).mul_(decay),
        value=solved[..., : shape.value_dim].contiguous(),
        read=solved[..., shape.value_dim :].contiguous(),
        decay=last.exp()[..., None],
    )


def _heads_first(columns: Tensor, chunks: int, heads: int) -> Tensor:
    """[chunks * 64, heads * d] -> [chunks, heads, 64, d], contiguous."""
    return columns.reshape(chunks, ROWS, heads, -1).transpose(1, 2).contiguous()
