"""The causal depthwise convolution in front of the delta rule, with its silu.

On a card it is part of `gated_delta`'s launches.
"""

from kernels.conv.reference import prefill, update

__all__ = ["prefill", "update"]
