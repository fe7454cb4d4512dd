"""One residual block: x += mixer(norm(x)); x += mlp(norm(x))."""

from __future__ import annotations

from torch import Tensor

from kernels import norm_rope
from services.gpu_worker.engine.layers.gated_attention import GatedAttention
from services.gpu_worker.engine.layers.gated_delta import GatedDeltaNet
from services.gpu_worker.engine.layers.mlp import MLP
from services.gpu_worker.engine.layers.steps import AttentionStep, Step


class Block:
    """Either kind of mixer between two zero-centred norms (`scale` = 1 + w)."""

    def __init__(
        self,
        mixer: GatedAttention | GatedDeltaNet,
        mlp: MLP,
        mixer_scale: Tensor,
        mlp_scale: Tensor,
        eps: float,
    ) -> None:
        self._mixer = mixer
        self._mlp = mlp
        self._mixer_scale = mixer_scale
        self._mlp_scale = mlp_scale
        self._eps = eps

    def __call__(self, x: Tensor, step: Step | AttentionStep) -> Tensor:
        """[M, H] contiguous, advanced in place."""
        x.add_(self._mixer(norm_rope.rms_norm(x, self._mixer_scale, self._eps), step))
        return x.add_(self._mlp(norm_rope.rms_norm(x, self._mlp_scale, self._eps)))
