"""The causal depthwise convolution in front of the delta rule, with its silu."""

from kernels.conv.reference import prefill, update

__all__ = ["prefill", "update"]
