"""The SwiGLU feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from kernels import matmul


class MLP:
    """down(silu(gate x) * up x); gate and up are one product."""

    def __init__(self, gate_up: matmul.Packed, down: matmul.Packed, *, in_parts: bool = False) -> None:
        """gate_up [2I, H], packed as pairs; down [H, I]. `in_parts`: its output goes to a norm that adds parts."""
        self._gate_up = gate_up
        self._down = down
        self._product = matmul.linear_parts if in_parts else matmul.linear

    def __call__(self, x: Tensor, *, prefill: bool) -> Tensor:
        """[M, H] -> [M, H], or the parts of it (`matmul.linear_parts`)."""
        inner = matmul.linear_swiglu(x, self._gate_up, prefill=prefill)
        return self._product(inner, self._down, prefill=prefill)
