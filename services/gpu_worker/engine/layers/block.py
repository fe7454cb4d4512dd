"""One residual block: x += mixer(norm(x)); x += mlp(norm(x)), where an addition is done by the norm that follows it."""

from __future__ import annotations

from torch import Tensor

from kernels import norm_rope
from services.gpu_worker.engine.layers.gated_attention import GatedAttention
from services.gpu_worker.engine.layers.gated_delta import GatedDeltaNet
from services.gpu_worker.engine.layers.latent_attention import LatentAttention
from services.gpu_worker.engine.layers.mixture import Mixture
from services.gpu_worker.engine.layers.mlp import MLP
from services.gpu_worker.engine.layers.steps import AttentionStep, Step


class Block:
    """Any kind of mixer between two norms, `scale` the factor that they multiply by: 1 + w of zero-centred ones."""

    def __init__(
        self,
        mixer: GatedAttention | GatedDeltaNet | LatentAttention,
        mlp: MLP | Mixture,
        mixer_scale: Tensor,
        mlp_scale: Tensor,
        eps: float,
    ) -> None:
        self._mixer = mixer
        self._mlp = mlp
        self._mixer_scale = mixer_scale
        self._mlp_scale = mlp_scale
        self._eps = eps

    def __call__(self, x: Tensor, delta: Tensor | None, step: Step | AttentionStep) -> Tensor:
        """x [M, H] contiguous, advanced in place by `delta`, which the block below left, and by the mixer.

        Returns what this block's mlp leaves to be added, [M, H] or the parts of it.
        """
        if delta is None:
            normed = norm_rope.rms_norm(x, self._mixer_scale, self._eps)
        else:
            normed = norm_rope.add_rms_norm(x, delta, self._mixer_scale, self._eps)
        mixed = self._mixer(normed, step)
        return self._mlp(norm_rope.add_rms_norm(x, mixed, self._mlp_scale, self._eps), prefill=step.prefill)
