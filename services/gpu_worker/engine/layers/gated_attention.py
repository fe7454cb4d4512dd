"""Full attention with per-head norms, partial RoPE and a sigmoid output gate (Qwen3.5 class)."""

from __future__ import annotations

from torch import Tensor

from kernels import matmul, paged_attention
from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.layers import paged
from services.gpu_worker.engine.layers.steps import AttentionStep, Step


class GatedAttention:
    """Writes its KV plane, then attends: o(attention * sigmoid(gate))."""

    def __init__(
        self,
        dims: ModelDims,
        plane: int,
        projection: matmul.Packed,
        output: matmul.Packed,
        head_scale: Tensor,
    ) -> None:
        """projection: rows [q of all heads | k | gate of all heads | v]; output [H, heads * head_dim];
        head_scale [heads + kv_heads, head_dim]: 1 + w of q_norm (times head_dim^-0.5) and k_norm."""
        self._plane = plane
        self._projection = projection
        self._output = output
        self._scale = head_scale
        self._heads = dims.heads
        self._kv_heads = dims.kv_heads
        self._width = dims.head_dim
        self._eps = dims.eps

    def __call__(self, x: Tensor, step: Step | AttentionStep) -> Tensor:
        """[M, H] -> [M, H], or the parts of it (`matmul.linear_parts`); M = sequences * columns of the step."""
        at = step if isinstance(step, AttentionStep) else step.attention
        normed = (self._heads + self._kv_heads) * self._width
        y = matmul.linear(x, self._projection, prefill=step.prefill)
        keys, values = at.kv.k[self._plane], at.kv.v[self._plane]
        query = paged_attention.qk_norm_rope_write(y, self._scale, keys, values, at.writes, self._eps)
        gate = y[:, normed : normed + self._heads * self._width]
        attended = paged.attend(self._plane, query, at, gate)
        return matmul.linear_parts(attended, self._output, prefill=step.prefill)
