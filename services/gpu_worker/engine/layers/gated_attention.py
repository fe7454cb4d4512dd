"""Full attention with per-head norms, partial RoPE and a sigmoid output gate (Qwen3.5 class)."""

from __future__ import annotations

from torch import Tensor

from kernels import activation, matmul, norm_rope
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
        """[M, H] -> [M, H]; M = sequences * columns of the step."""
        at = step if isinstance(step, AttentionStep) else step.attention
        rows, normed = x.shape[0], (self._heads + self._kv_heads) * self._width
        y = matmul.linear(x, self._projection)
        both = norm_rope.qk_norm_rope(
            y[:, :normed].reshape(rows, -1, self._width), self._scale, at.cos_sin, self._eps
        )
        gate_end = normed + self._heads * self._width
        values = y[:, gate_end:].view(rows, self._kv_heads, self._width)
        paged.write(self._plane, both[:, self._heads :], values, at)
        out = paged.attend(self._plane, both[:, : self._heads], at)
        return matmul.linear(activation.sigmoid_gate(out, y[:, normed:gate_end]), self._output)
