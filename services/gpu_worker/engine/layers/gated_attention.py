"""Full attention with per-head norms, partial RoPE and a sigmoid output gate (Qwen3.5 class)."""

from __future__ import annotations

from torch import Tensor

from kernels import activation, matmul, norm_rope, paged_attention
from services.gpu_worker.engine.config import ModelDims
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
        self._write(both[:, self._heads :], y[:, gate_end:].view(rows, self._kv_heads, self._width), at)
        out = self._attend(both[:, : self._heads], at)
        return matmul.linear(activation.sigmoid_gate(out, y[:, normed:gate_end]), self._output)

    def _write(self, keys: Tensor, values: Tensor, at: AttentionStep) -> None:
        if at.real_rows is not None:
            keys, values = keys.index_select(0, at.real_rows), values.index_select(0, at.real_rows)
        paged_attention.write_rows(at.kv.k[self._plane], keys, at.targets)
        paged_attention.write_rows(at.kv.v[self._plane], values, at.targets)

    def _attend(self, query: Tensor, at: AttentionStep) -> Tensor:
        """[M, heads, head_dim] -> [M, heads * head_dim], through whole query tiles."""
        rows = query.shape[0]
        tiled = query.new_zeros(at.sequences, at.padded_columns, self._heads, self._width)
        tiled[:, : at.columns] = query.view(at.sequences, at.columns, self._heads, self._width)
        flat = tiled.view(-1, self._heads, self._width)
        keys, values = at.kv.k[self._plane], at.kv.v[self._plane]
        for where, plan in at.plans:
            flat[where] = paged_attention.attend(flat[where], keys, values, plan)
        return tiled[:, : at.columns].reshape(rows, self._heads * self._width)
