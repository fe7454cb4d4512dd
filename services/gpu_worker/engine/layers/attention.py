"""Attention of dense decoders: optional per-head norms, RoPE, over all rows before or over a window of them."""

from __future__ import annotations

from torch import Tensor

from kernels import matmul, norm_rope
from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.layers import paged
from services.gpu_worker.engine.layers.steps import AttentionStep, Step
from shared.errors import EngineFault


class Attention:
    """Writes its plane (of the paged pool, or of the slots' rings if it slides), then attends."""

    def __init__(
        self,
        dims: ModelDims,
        plane: int,
        projection: matmul.Packed,
        output: matmul.Packed,
        head_scale: Tensor,
        *,
        normed: bool,
        sliding: bool,
    ) -> None:
        """projection: rows [q of all heads | k | v]; output [H, heads * head_dim]; `plane` counts layers of its kind.

        head_scale: what queries and keys are multiplied by, [heads + kv_heads, head_dim] of the norms' weights if
        `normed`, else [heads + kv_heads, 1]; the softmax scale is in the queries' part.
        """
        self._plane = plane
        self._projection = projection
        self._output = output
        self._scale = head_scale
        self._normed = normed
        self._sliding = sliding
        self._heads = dims.heads
        self._kv_heads = dims.kv_heads
        self._width = dims.head_dim
        self._eps = dims.eps

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """[M, H] -> [M, H]; M = sequences * columns of the step."""
        at = self._rows(step)
        rows, turned = x.shape[0], (self._heads + self._kv_heads) * self._width
        y = matmul.linear(x, self._projection, prefill=step.prefill)
        heads = y[:, :turned].reshape(rows, -1, self._width)
        if self._normed:
            both = norm_rope.qk_norm_rope(heads, self._scale, at.cos_sin, self._eps)
        else:
            both = norm_rope.qk_rope(heads, self._scale, at.cos_sin)
        values = y[:, turned:].view(rows, self._kv_heads, self._width)
        paged.write(self._plane, both[:, self._heads :], values, at)
        out = paged.attend(self._plane, both[:, : self._heads], at)
        return matmul.linear(out, self._output, prefill=step.prefill)

    def _rows(self, step: Step) -> AttentionStep:
        if not self._sliding:
            return step.attention
        if step.local is None:
            raise EngineFault("a sliding layer was given a step without rings")
        return step.local
