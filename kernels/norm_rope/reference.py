"""RMS norms, l2 norm and NeoX RoPE, one row at a time. Inputs of a reduction are made contiguous: on strided input torch
picks another order of addition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation.reference import silu


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * scale over the last dimension.

    `scale` is the factor itself: 1 + w for the trunk's zero-centred weights, prepared once by the caller.
    """
    return F.rms_norm(x.contiguous(), (x.shape[-1],), scale, eps)


def add_rms_norm(x: Tensor, delta: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x += delta in place, then the norm of the sum. delta [M, W], or [slices, M, W], `added` first."""
    return rms_norm(x.add_(added(delta, x.dtype)), scale, eps)


def added(delta: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, W] as it is; of [slices, M, W] the sum in slice order, rounded to `dtype` once."""
    if delta.dim() == 2:
        return delta
    total = delta[0].clone()
    for part in delta[1:]:
        total.add_(part)
    return total.to(dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * weight * silu(gate), per head: x, gate [..., dv]; weight [dv] starts at ones, not at zeros."""
    return F.rms_norm(x.contiguous(), (x.shape[-1],), weight, eps).mul_(silu(gate))


def l2_norm(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """x * rsqrt(sum(x^2) + eps) * scale, `scale` broadcast against x.

    Computed as an RMS norm (mean = sum / d), so `scale` must hold the factor d^-0.5 that turns one into the other.
    """
    width = x.shape[-1]
    return F.rms_norm(x.contiguous(), (width,), None, eps / width).mul_(scale)


def rope_table(rotary_dim: int, theta: float, positions: int) -> Tensor:
    """cos and sin of p * theta^(-2i / rotary_dim): [positions, 2, rotary_dim / 2], cos first."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * (1.0 / (theta**exponents))
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def qk_norm_rope(x: Tensor, scale: Tensor, cos_sin: Tensor, eps: float) -> Tensor:
    """Norm every head, then turn its first elements by the row's position.

    x [M, heads, head_dim]; scale [heads, head_dim] (1 + w, and for queries the softmax scale); cos_sin [M, 2, half] from
    `rope_table`. NeoX layout: element i of the first half pairs with element i of the second; the rest passes through.
    """
    return _turn(F.rms_norm(x.contiguous(), (x.shape[-1],), None, eps).mul_(scale), cos_sin)


def qk_rope(x: Tensor, scale: Tensor, cos_sin: Tensor) -> Tensor:
    """`qk_norm_rope` without the norm: x [M, heads, head_dim] times scale, then turned."""
    return _turn(x * scale, cos_sin)


def _turn(y: Tensor, cos_sin: Tensor) -> Tensor:
    """In place: the first elements of every head of y [M, heads, head_dim]."""
    half = cos_sin.shape[-1]
    cos, sin = cos_sin[:, :1], cos_sin[:, 1:]
    first, second = y[..., :half], y[..., half : 2 * half]
    turned = torch.addcmul(first * cos, second, sin, value=-1.0)
    torch.addcmul(second * cos, first, sin, out=second)
    first.copy_(turned)
    return y
