"""Multi-head latent attention (DeepSeek and GLM class), absorbed: heads attend to latents, never to keys and values of theirs.

Per row x and head h, with the latent c [rank] of every row and its key part r [rope_dim], which all heads share:

    c     = rms_norm(W_c x), r = rope(W_r x)                       one row [c | r] a token is all that is kept
    q_h   = [n_h | t_h] of W_q x, or of W_q rms_norm(W_a x);  t_h turned
    score = (n_h K_h) . c + t_h . r, K_h [nope_dim, rank]         = n_h . (K_h c), the head's key never made
    out_h = V_h sum of weights * c, V_h [value_dim, rank]         = the weighted sum of the head's values V_h c

So a cached row is the key of one KV head that all heads share, and its first part the value. `K_h` and `V_h` are a packed
product a head, in both phases alike.

Source: transformers 5.24, `Glm4MoeLiteAttention`, which makes keys and values; its inner norms have an epsilon of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import matmul, norm_rope, paged_attention
from services.gpu_worker.engine.config import Latent
from services.gpu_worker.engine.layers import paged
from services.gpu_worker.engine.layers.key_index import Index
from services.gpu_worker.engine.layers.steps import AttentionStep, Step

INNER_EPS: Final = 1e-6
"""Of the latents' norms, whatever `rms_norm_eps` says."""


class HeadProducts:
    """One product a head."""

    def __init__(self, packed: Sequence[matmul.Packed]) -> None:
        """Each [N, K]."""
        self._packed = packed

    def __call__(self, x: Tensor, *, prefill: bool) -> Tensor:
        """[M, heads, K] -> [M, heads, N] contiguous."""
        parts = x.transpose(0, 1).contiguous()
        out = [
            matmul.linear(part, packed, prefill=prefill)
            for part, packed in zip(parts, self._packed, strict=True)
        ]
        return torch.stack(out, dim=1)


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Of one layer. Rows of RoPE parts are such that halves pair."""

    down: matmul.Packed
    """[query_rank + rank + rope_dim, H]; without a query latent the queries' rows in its place."""
    query_norm: Tensor | None
    """[query_rank]."""
    query: matmul.Packed | None
    """[heads * rope_dim + heads * nope_dim, query_rank]."""
    latent_norm: Tensor
    """[rank]."""
    keys: HeadProducts
    """Each K_h transposed, [rank, nope_dim]."""
    values: HeadProducts
    """Each V_h, [value_dim, rank]."""
    output: matmul.Packed
    """[H, heads * value_dim]."""


class LatentAttention:
    """Writes its plane of latent rows, then attends."""

    def __init__(
        self,
        widths: Latent,
        heads: int,
        plane: int,
        weights: LatentWeights,
        softmax_scale: float,
        index: Index | None = None,
        *,
        owns_index: bool = True,
    ) -> None:
        """`index` of sparse attention, of this layer or, if it does not own it, of one below."""
        self._widths = widths
        self._heads = heads
        self._plane = plane
        self._weights = weights
        self._softmax_scale = softmax_scale
        self._index = index
        self._owns_index = owns_index
        self._one = torch.ones(1, widths.rope_dim, device=weights.latent_norm.device)

    def __call__(self, x: Tensor, step: Step | AttentionStep) -> Tensor:
        """[M, H] -> [M, H], or the parts of it (`matmul.linear_parts`); M = sequences * columns of the step."""
        at = step if isinstance(step, AttentionStep) else step.attention
        widths, weights = self._widths, self._weights
        y = matmul.linear(x, weights.down, prefill=step.prefill)
        kept = widths.rank + widths.rope_dim
        queries, latent, shared = y.split([y.shape[1] - kept, widths.rank, widths.rope_dim], dim=1)
        queries = self._inner(queries)
        at = self._write(self._row(latent, shared, at), x, queries, at)
        mixed = paged.attend_latent(self._plane, self._query(queries, at), at, widths.rank)
        out = weights.values(mixed, prefill=step.prefill).flatten(1)
        return matmul.linear_parts(out, weights.output, prefill=step.prefill)

    def _inner(self, queries: Tensor) -> Tensor:
        """The queries' latent, normed, if they have one."""
        norm = self._weights.query_norm
        return queries if norm is None else norm_rope.rms_norm(queries.contiguous(), norm, INNER_EPS)

    def _row(self, latent: Tensor, shared: Tensor, at: AttentionStep) -> Tensor:
        """[M, rank + rope_dim]."""
        normed = norm_rope.rms_norm(latent.contiguous(), self._weights.latent_norm, INNER_EPS)
        turned = norm_rope.qk_rope(shared[:, None], self._one, at.cos_sin)[:, 0]
        return torch.cat([normed, turned.to(normed.dtype)], dim=1)

    def _write(self, row: Tensor, x: Tensor, inner: Tensor, at: AttentionStep) -> AttentionStep:
        """Put rows into the pages, index keys behind them; the step over the keys that they see."""
        index, plane = self._index, at.kv.k[self._plane]
        if index is None:
            paged_attention.write_latent(row, plane, at.writes)
            return at
        if not self._owns_index:
            paged_attention.write_latent(F.pad(row, (0, plane.shape[3] - row.shape[1])), plane, at.writes)
            return index.chosen(at)
        key, weights = index.keys(x, at)
        paged_attention.write_latent(torch.cat([row, key], dim=1), plane, at.writes)
        return index.choose(self._plane, inner, weights, at)

    def _query(self, queries: Tensor, at: AttentionStep) -> Tensor:
        """[M, heads, rank + rope_dim], times the softmax scale."""
        weights, heads, rope = self._weights, self._heads, self._widths.rope_dim
        if weights.query is not None:
            queries = matmul.linear(queries, weights.query, prefill=at.prefill)
        turned = norm_rope.qk_rope(
            queries[:, : heads * rope].unflatten(1, (heads, rope)), self._one, at.cos_sin
        )
        own = weights.keys(queries[:, heads * rope :].unflatten(1, (heads, -1)), prefill=at.prefill)
        return torch.cat([own, turned.to(own.dtype)], dim=-1).mul_(self._softmax_scale)
