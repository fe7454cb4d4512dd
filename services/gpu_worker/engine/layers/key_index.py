"""Sparse attention's index (GLM-5 class): a key of its own in every row, and queries that choose which rows are attended to.

    key      = rope(layer_norm(W_k x))                      kept behind the latent row
    query_h  = rope(W_q z), z the queries' normed latent     a few narrow heads
    weight_h = (W_w x)_h / sqrt(heads * width)

Layers that share take over what the nearest index below them chose in the same forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import matmul, norm_rope
from kernels.paged_attention import AttentionPlan
from services.gpu_worker.engine.config import KeyIndex
from services.gpu_worker.engine.layers import paged
from services.gpu_worker.engine.layers.steps import AttentionStep
from shared.errors import EngineFault

_EPS = 1e-6

Plans = tuple[tuple[slice, AttentionPlan], ...]
"""As in `AttentionStep`."""


@dataclass(frozen=True, slots=True)
class IndexWeights:
    """Of one layer. Elements that RoPE turns come first in a head, in an order in which halves pair."""

    down: matmul.Packed
    """[width + heads, H]: keys, then the heads' weights."""
    query: matmul.Packed
    """[heads * width, query_rank]."""
    norm: Tensor
    """[width]."""
    bias: Tensor
    """[width]."""


class Index:
    """Of one layer, and what it chose in the forward that runs."""

    def __init__(self, widths: KeyIndex, weights: IndexWeights) -> None:
        self._widths = widths
        self._weights = weights
        self._one = torch.ones(1, widths.width, device=weights.norm.device)
        self._scale = (widths.heads * widths.width) ** -0.5
        self._rows = torch.empty(0)
        """Of the forward: its positions' cosines and sines, which no other has."""
        self._plans: Plans = ()

    def keys(self, x: Tensor, at: AttentionStep) -> tuple[Tensor, Tensor]:
        """[M, H] -> index keys [M, width] and the heads' weights [M, heads]."""
        y = matmul.linear(x, self._weights.down, prefill=at.prefill)
        key, weights = y.split([self._widths.width, self._widths.heads], dim=1)
        normed = F.layer_norm(
            key.float(), (self._widths.width,), self._weights.norm, self._weights.bias, _EPS
        ).to(key.dtype)
        turned = norm_rope.qk_rope(normed[:, None], self._one, at.cos_sin)[:, 0]
        return turned.to(key.dtype), weights * self._scale

    def choose(self, plane: int, latent: Tensor, weights: Tensor, at: AttentionStep) -> AttentionStep:
        """The step over the chosen keys, once the rows are written; `latent` [M, query_rank], `weights` of `keys`."""
        rows = matmul.linear(latent, self._weights.query, prefill=at.prefill)
        query = norm_rope.qk_rope(rows.unflatten(1, (self._widths.heads, -1)), self._one, at.cos_sin)
        step = paged.narrowed(plane, query.to(rows.dtype), weights, at, self._widths.most)
        self._rows, self._plans = at.cos_sin, step.plans
        return step

    def chosen(self, at: AttentionStep) -> AttentionStep:
        """What `choose` answered for the rows of this step."""
        if self._rows is not at.cos_sin:
            raise EngineFault("a layer that shares an index ran before the layer that owns it")
        return replace(at, plans=self._plans)
