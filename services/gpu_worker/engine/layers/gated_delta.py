"""The gated delta net mixer: convolution, delta rule, gated norm (Qwen3.5 class)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels import gated_delta, matmul, norm_rope
from services.gpu_worker.engine.cache.state_pool import delta_shape
from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.layers.steps import AttentionStep, DecodeStep, PrefillStep, Step
from shared.errors import EngineFault


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """projection: rows [q k v | b | a | z]; conv [K, C]; rate = exp(A_log) [nv]; dt_bias [nv]; norm [dv]; output [H, nv dv]."""

    projection: matmul.Packed
    conv: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    output: matmul.Packed


class GatedDeltaNet:
    """Advances the recurrent and conv states of its layer in the pool."""

    def __init__(self, dims: ModelDims, layer: int, weights: DeltaWeights) -> None:
        """`layer` counts the gated-delta layers from the bottom, the pool's index."""
        self._layer = layer
        self._weights = weights
        self._shape = delta_shape(dims)
        self._scale = gated_delta.qk_scale(self._shape).to(weights.rate.device)
        self._eps = dims.eps

    def __call__(self, x: Tensor, step: Step | AttentionStep) -> Tensor:
        """[M, H] -> [M, H], or the parts of it (`matmul.linear_parts`)."""
        shape, rows = self._shape, x.shape[0]
        y = matmul.linear(x, self._weights.projection, prefill=step.prefill)
        match step:
            case PrefillStep():
                out = self._prefill(y, step)
            case DecodeStep():
                out = self._decode(y, step)
            case AttentionStep():
                raise EngineFault("a gated-delta layer was given a step without recurrent states")
        gate = y[:, shape.packed :].view(rows, shape.value_heads, shape.value_dim)
        normed = norm_rope.gated_norm(out, gate, self._weights.norm, self._eps)
        return matmul.linear_parts(normed.view(rows, -1), self._weights.output, prefill=step.prefill)

    def _prefill(self, y: Tensor, step: PrefillStep) -> Tensor:
        layer, slot, states = self._layer, step.slot, step.states
        window = states.windows[layer, slot, : states.taps]
        state = states.state[layer, slot]
        return gated_delta.prefill(y, self._weights, state, window, step.rows, self._shape, self._scale)

    def _decode(self, y: Tensor, step: DecodeStep) -> Tensor:
        layer, states = self._layer, step.states
        return gated_delta.decode(
            y,
            self._weights,
            states.state[layer],
            states.store[layer],
            states.windows[layer],
            step.replay,
            self._shape,
            self._scale,
        )
