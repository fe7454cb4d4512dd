"""Activations on the card: float32 inside, one rounding. Element-wise, so bits cannot depend on the launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import PDL, row_steps

_BLOCK = 1024


@triton.jit
def sigmoid_of(x):
    """1 / (1 + exp(-x)); exp overflows to inf below -88, which gives the right 0."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu_of(x):
    """x * sigmoid(x), as one division."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus_of(x):
    """log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), which never overflows.

    1 + e is rounded before the log; (u - 1) / e undoes that rounding to first order (log1p, as Kahan writes it).
    """
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + small


@triton.jit(do_not_specialize=["x_steps", "gate_steps"])
def _gate_kernel(
    x, gate, out, x_steps, gate_steps,
    WIDTH: tl.constexpr, SWIGLU: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block of one row: silu(gate) * x for `SWIGLU`, else x * sigmoid(gate). Grid (blocks of a row, rows)."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_steps * 8 + column, mask=mask, other=0.0).to(tl.float32)
    by = tl.load(gate + row * gate_steps * 8 + column, mask=mask, other=0.0).to(tl.float32)
    grown = 1.0 + tl.exp(-by)
    result = by / grown * value if SWIGLU else value / grown
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor) -> Tensor:
    """[M, 2 * I] (gate, then up) -> silu(gate) * up, [M, I] contiguous."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _gate(up, gate, swiglu=True)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate) in x's dtype, contiguous; both [M, W] with contiguous rows."""
    return _gate(x, gate, swiglu=False)


def _gate(x: Tensor, gate: Tensor, *, swiglu: bool) -> Tensor:
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _gate_kernel[(triton.cdiv(width, _BLOCK), rows)](
        x,
        gate,
        out,
        row_steps(x),
        row_steps(gate),
        WIDTH=width,
        SWIGLU=swiglu,
        BLOCK=_BLOCK,
        num_warps=4,
        **PDL,
    )
    return out


@triton.jit(do_not_specialize=["rows", "b_stride", "a_stride"])
def _delta_gates_kernel(
    b, a, rate, bias, beta, g, rows, b_stride, a_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """beta and g of one row. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    mask = head < HEADS
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    step = sigmoid_of(tl.load(b + row * b_stride + head, mask=mask, other=0.0).to(tl.float32))
    raised = tl.load(a + row * a_stride + head, mask=mask, other=0.0).to(tl.float32)
    raised += tl.load(bias + head, mask=mask, other=0.0)
    decay = -tl.load(rate + head, mask=mask, other=0.0) * softplus_of(raised)
    tl.store(beta + row * HEADS + head, step, mask=mask)
    tl.store(g + row * HEADS + head, decay, mask=mask)


def delta_gates(b: Tensor, a: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """beta = sigmoid(b), g = -rate * softplus(a + dt_bias), float32; b, a [..., heads], rate and dt_bias float32 [heads]."""
    heads = b.shape[-1]
    flat_b, flat_a = b.reshape(-1, heads), a.reshape(-1, heads)
    rows = flat_b.shape[0]
    beta, g = (torch.empty(*b.shape, dtype=torch.float32, device=b.device) for _ in range(2))
    _delta_gates_kernel[(rows,)](
        flat_b,
        flat_a,
        rate,
        dt_bias,
        beta,
        g,
        rows,
        flat_b.stride(0),
        flat_a.stride(0),
        HEADS=heads,
        BLOCK=triton.next_power_of_2(heads),
        num_warps=1,
        **PDL,
    )
    return beta, g
