"""The gated delta net mixer: convolution, delta rule, gated norm (Qwen3.5 class)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import activation, conv, gated_delta, matmul, norm_rope
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
        self._scale = gated_delta.qk_scale(self._shape)
        self._eps = dims.eps

    def __call__(self, x: Tensor, step: Step | AttentionStep) -> Tensor:
        """[M, H] -> [M, H]."""
        shape, rows = self._shape, x.shape[0]
        y = matmul.linear(x, self._weights.projection)
        match step:
            case PrefillStep():
                out = self._prefill(y, step)
            case DecodeStep():
                out = self._decode(y, step)
            case AttentionStep():
                raise EngineFault("a gated-delta layer was given a step without recurrent states")
        gate = y[:, shape.packed :].view(rows, shape.value_heads, shape.value_dim)
        normed = norm_rope.gated_norm(out, gate, self._weights.norm, self._eps)
        return matmul.linear(normed.view(rows, -1), self._weights.output)

    def _prefill(self, y: Tensor, step: PrefillStep) -> Tensor:
        window = step.states.windows[self._layer, step.slot]
        taps = self._weights.conv.shape[0] - 1
        mixed, tail = conv.prefill(window[:taps], y[:, : self._shape.channels], self._weights.conv, step.rows)
        window[:taps] = tail
        packed = torch.cat([mixed, *self._gates(y)], dim=-1)
        state = step.states.state[self._layer, step.slot]
        return gated_delta.chunk_prefill(state, packed, step.rows, self._shape, self._scale)

    def _decode(self, y: Tensor, step: DecodeStep) -> Tensor:
        states, plan = step.states, step.replay
        y = y.view(plan.slots.shape[0], -1, y.shape[-1])
        fresh = y[..., : self._shape.channels]
        mixed = conv.update(
            states.windows[self._layer], step.conv_history, plan.slots, fresh, self._weights.conv
        )
        packed = torch.cat([mixed, *self._gates(y)], dim=-1)
        out = gated_delta.replay_step(
            states.state[self._layer], states.store[self._layer], plan, packed, self._shape, self._scale
        )
        return out.reshape(-1, self._shape.value_heads, self._shape.value_dim)

    def _gates(self, y: Tensor) -> tuple[Tensor, Tensor]:
        first, heads = self._shape.channels, self._shape.value_heads
        b, a = y[..., first : first + heads], y[..., first + heads : first + 2 * heads]
        return activation.delta_gates(b, a, self._weights.rate, self._weights.dt_bias)
