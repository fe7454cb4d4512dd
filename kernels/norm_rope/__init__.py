"""Norms over the last dimension, and partial rotary positions."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import device_module, on_card
from kernels.norm_rope import reference
from kernels.norm_rope.reference import added, l2_norm, qk_norm_rope, qk_rope, rope_table

__all__ = [
    "add_rms_norm",
    "added",
    "gated_norm",
    "l2_norm",
    "qk_norm_rope",
    "qk_rope",
    "rms_norm",
    "rope_table",
]


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * scale over the last dimension, in x's dtype."""
    return (device_module("norm_rope") if on_card(x) else reference).rms_norm(x, scale, eps)


def add_rms_norm(x: Tensor, delta: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x += delta in place, then the norm of the (rounded) sum. delta [M, W], or the parts of a product, float32
    [slices, M, W] (`matmul.linear_parts`): `added` first."""
    return (device_module("norm_rope") if on_card(x) else reference).add_rms_norm(x, delta, scale, eps)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * weight * silu(gate) per head, x and gate [M, heads, dv]; in the gate's dtype on the card."""
    return (device_module("norm_rope") if on_card(x) else reference).gated_norm(x, gate, weight, eps)
