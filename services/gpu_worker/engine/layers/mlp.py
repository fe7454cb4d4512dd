"""The SwiGLU feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from kernels import matmul


class MLP:
    """down(silu(gate x) * up x); gate and up are one product."""

    def __init__(self, gate_up: matmul.Packed, down: matmul.Packed) -> None:
        """gate_up [2I, H], packed as pairs; down [H, I]."""
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor, *, prefill: bool) -> Tensor:
        """[M, H] -> [M, H]."""
        inner = matmul.linear_swiglu(x, self._gate_up, prefill=prefill)
        return matmul.linear(inner, self._down, prefill=prefill)
