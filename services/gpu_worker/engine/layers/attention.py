"""Attention of dense decoders: optional per-head norms, RoPE, over all rows before or over a window of them."""

from __future__ import annotations

from torch import Tensor

from kernels import matmul, paged_attention
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

        head_scale [heads + kv_heads, head_dim]: what queries and keys are multiplied by, after their norms if they are
        `normed`; the softmax scale is in the queries' part.
        """
        self._plane = plane
        self._projection = projection
        self._output = output
        self._scale = head_scale
        self._sliding = sliding
        self._eps = dims.eps if normed else None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """[M, H] -> [M, H]; M = sequences * columns of the step."""
        at = self._rows(step)
        y = matmul.linear(x, self._projection, prefill=step.prefill)
        keys, values = at.kv.k[self._plane], at.kv.v[self._plane]
        query = paged_attention.qk_norm_rope_write(y, self._scale, keys, values, at.writes, self._eps)
        return matmul.linear(paged.attend(self._plane, query, at), self._output, prefill=step.prefill)

    def _rows(self, step: Step) -> AttentionStep:
        if not self._sliding:
            return step.attention
        if step.local is None:
            raise EngineFault("a sliding layer was given a step without rings")
        return step.local
