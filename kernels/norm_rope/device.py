"""Norms on the card: one row (or one head) in registers, float32 inside, one rounding."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import PDL, row_steps

_HEADS: Final = 4
"""Heads of one gated-norm program, a warp each."""


@triton.jit
def normed(x, scale, eps, WIDTH: tl.constexpr):
    """x * rsqrt(mean(x^2) + eps) * scale over the last axis, float32."""
    mean = tl.sum(x * x, axis=-1, keep_dims=True) / WIDTH
    return x * tl.rsqrt(mean + eps) * scale


@triton.jit(do_not_specialize=["x_steps"])
def _rms_norm_kernel(
    x, scale, out, x_steps, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """One row. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    by = tl.load(scale + column, mask=mask, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_steps * 8 + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, normed(value, by, eps, WIDTH).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_steps", "delta_steps", "slice_steps"])
def _add_rms_norm_kernel(
    x, delta, scale, out, x_steps, delta_steps, slice_steps, eps,
    SLICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row: the slices of delta in order, rounded; onto x, rounded; then the norm of what was stored. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    by = tl.load(scale + column, mask=mask, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = delta + row * delta_steps * 8 + column
    added = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, SLICES):
        at += slice_steps.to(tl.int64) * 8
        added += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    added = added.to(x.dtype.element_ty).to(tl.float32)
    here = x + row * x_steps * 8 + column
    total = (tl.load(here, mask=mask, other=0.0).to(tl.float32) + added).to(x.dtype.element_ty)
    tl.store(here, total, mask=mask)
    result = normed(total.to(tl.float32), by, eps, WIDTH)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_steps", "gate_steps"])
def _gated_norm_kernel(
    x, gate, weight, out, x_steps, gate_steps, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`GROUP` heads of one row: norm, then silu(gate). Grid (groups of heads, rows)."""
    row = tl.program_id(1).to(tl.int64)
    head = (tl.program_id(0) * GROUP + tl.arange(0, GROUP))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (head < HEADS) & (column < WIDTH)
    within = head * WIDTH + column
    by = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_steps * 8 + within, mask=mask, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_steps * 8 + within, mask=mask, other=0.0).to(tl.float32)
    result = normed(value, by, eps, WIDTH) * (opened / (1.0 + tl.exp(-opened)))
    tl.store(out + row * (HEADS * WIDTH) + within, result.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """The norm over the last dimension of x [..., W] in x's dtype, contiguous; scale [W]."""
    width = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm_kernel[(rows.shape[0],)](
        rows, scale, out, row_steps(rows), eps, WIDTH=width, **_row_options(width)
    )
    return out


def add_rms_norm(x: Tensor, delta: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x += delta in place, rounded once; the norm of the rounded sum, [M, W] in x's dtype.

    delta [M, W], or [slices, M, W] (float32 parts of a product), added in slice order and rounded as the product would be
    before they meet x.
    """
    rows, width = x.shape
    parts = delta[None] if delta.dim() == 2 else delta
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _add_rms_norm_kernel[(rows,)](
        x,
        parts,
        scale,
        out,
        row_steps(x),
        row_steps(parts[0]),
        row_steps(parts),
        eps,
        SLICES=parts.shape[0],
        WIDTH=width,
        **_row_options(width),
    )
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * weight * silu(gate) per head, [M, heads, dv] contiguous in the gate's dtype.

    x float32 or bfloat16, gate: both [M, heads, dv] with contiguous rows (a column view of a projection will do).
    """
    rows, heads, width = x.shape
    out = torch.empty(rows, heads, width, dtype=gate.dtype, device=x.device)
    _gated_norm_kernel[(triton.cdiv(heads, _HEADS), rows)](
        x,
        gate,
        weight,
        out,
        row_steps(x),
        row_steps(gate),
        eps,
        HEADS=heads,
        WIDTH=width,
        GROUP=_HEADS,
        BLOCK=triton.next_power_of_2(width),
        num_warps=_HEADS,
        **PDL,
    )
    return out


def _row_options(width: int) -> dict[str, int | bool]:
    """Block, warps and overlap of a kernel that holds a row in registers: functions of the width."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512)), **PDL}
