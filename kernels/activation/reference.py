"""Activations composed from exp, log1p and arithmetic.

torch's own `sigmoid`, `silu` and `softplus` compute the scalar tail of a vector loop in another way than its body, so an
element's bits depend on the element count; `exp`, `log1p` and the four operations do not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_GELU = math.sqrt(2.0 / math.pi)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); exp overflows to inf below -88, which gives the right 0."""
    return x.neg().exp_().add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), as one division."""
    return torch.div(x, x.neg().exp_().add_(1.0))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), which never overflows."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp_min(0.0))


def swiglu(gate_up: Tensor) -> Tensor:
    """[M, 2 * I] (gate, then up) -> silu(gate) * up, [M, I] contiguous."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up).contiguous()


def geglu(gate_up: Tensor) -> Tensor:
    """[M, 2 * I] (gate, then up) -> gelu(gate) * up, [M, I] contiguous, with the tanh form of gelu; rounded once.

    x (1 + tanh u) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3): one exponential, no cancellation.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    twice = gate.square().mul_(-2.0 * _GELU * 0.044715).sub_(2.0 * _GELU).mul_(gate)
    return torch.div(gate, twice.exp_().add_(1.0)).mul_(up).to(gate_up.dtype).contiguous()


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place: keeps the order and bounds the value. torch's tanh has the same bits at any count."""
    return x.div_(cap).tanh_().mul_(cap)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), as one division; the shapes agree."""
    return torch.div(x, gate.neg().exp_().add_(1.0))


def delta_gates(b: Tensor, a: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """beta = sigmoid(b) and g = -rate * softplus(a + dt_bias); [..., heads], `rate` = exp(A_log) [heads].

    g <= 0 is the log of the state's decay, beta in (0, 1) the step of the delta rule.
    """
    return sigmoid(b), softplus(a + dt_bias).mul_(rate).neg_()
