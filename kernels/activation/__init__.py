"""Activations whose bits do not depend on how many elements share the call."""

from kernels.activation.reference import delta_gates, sigmoid, sigmoid_gate, silu, softplus, swiglu

__all__ = ["delta_gates", "sigmoid", "sigmoid_gate", "silu", "softplus", "swiglu"]
