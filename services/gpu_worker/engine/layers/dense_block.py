"""The residual block of dense decoders, with norms before its parts or around them."""

from __future__ import annotations

from torch import Tensor

from kernels import activation, matmul, norm_rope
from services.gpu_worker.engine.layers.attention import Attention
from services.gpu_worker.engine.layers.mixture import Mixture
from services.gpu_worker.engine.layers.mlp import MLP
from services.gpu_worker.engine.layers.steps import Step


class GeluMLP:
    """down(gelu(gate x) * up x), gelu in its tanh form; gate and up are one product."""

    def __init__(self, gate_up: matmul.Packed, down: matmul.Packed) -> None:
        """gate_up [2I, H], down [H, I]."""
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor, *, prefill: bool) -> Tensor:
        """[M, H] -> [M, H]."""
        inner = activation.geglu(matmul.linear(x, self._gate_up, prefill=prefill))
        return matmul.linear(inner, self._down, prefill=prefill)


class DenseBlock:
    """x += [norm] attention(norm x); x += [norm] mlp(norm x)."""

    def __init__(
        self,
        attention: Attention,
        mlp: MLP | GeluMLP | Mixture,
        before: tuple[Tensor, Tensor],
        after: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> None:
        """`before`, `after` [H] each: norm factors of attention and mlp; `after` null = what they give is added as it
        is."""
        self._attention = attention
        self._mlp = mlp
        self._before = before
        self._after = after
        self._eps = eps

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """[M, H] contiguous, advanced in place."""
        normed = norm_rope.rms_norm(x, self._before[0], self._eps)
        x.add_(self._around(0, self._attention(normed, step)))
        normed = norm_rope.rms_norm(x, self._before[1], self._eps)
        return x.add_(self._around(1, self._mlp(normed, prefill=step.prefill)))

    def _around(self, part: int, y: Tensor) -> Tensor:
        return y if self._after is None else norm_rope.rms_norm(y, self._after[part], self._eps)
