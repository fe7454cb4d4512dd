"""Activations whose bits do not depend on how many elements share the call."""

from __future__ import annotations

from torch import Tensor

from kernels.activation import reference
from kernels.activation.reference import geglu, sigmoid, silu, soft_cap, softplus
from kernels.dispatch import device_module, on_card

__all__ = ["delta_gates", "geglu", "sigmoid", "sigmoid_gate", "silu", "soft_cap", "softplus", "swiglu"]


def swiglu(gate_up: Tensor) -> Tensor:
    """[M, 2 * I] (gate, then up) -> silu(gate) * up, [M, I] contiguous."""
    return (device_module("activation") if on_card(gate_up) else reference).swiglu(gate_up)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate); the shapes agree, both may be column views."""
    return (device_module("activation") if on_card(x) else reference).sigmoid_gate(x, gate)


def delta_gates(b: Tensor, a: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """beta = sigmoid(b) and g = -rate * softplus(a + dt_bias), float32 [..., heads]."""
    return (device_module("activation") if on_card(b) else reference).delta_gates(b, a, rate, dt_bias)
