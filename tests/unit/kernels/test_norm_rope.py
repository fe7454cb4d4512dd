"""Norms and RoPE against their formulas, and the row gate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import norm_rope
from kernels.testing import assert_row_exact


@pytest.mark.parametrize("width", [16, 20, 64, 320])
def test_norms_keep_their_bits(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x, gate = torch.randn(160, 4, width, generator=generator), torch.randn(160, 4, width, generator=generator)
    scale = torch.randn(width, generator=generator)
    assert_row_exact(lambda rows: norm_rope.rms_norm(rows, scale, 1e-6), [x])
    assert_row_exact(lambda rows, gates: norm_rope.gated_norm(rows, gates, scale, 1e-6), [x, gate])
    assert_row_exact(lambda rows: norm_rope.l2_norm(rows, torch.tensor(width**-0.5)), [x])
    assert_row_exact(lambda rows: norm_rope.rms_norm(rows[:, ::2], scale, 1e-6), [x])


def test_norm_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 32, generator=generator), torch.randn(32, generator=generator)
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(
        norm_rope.rms_norm(x, w, 1e-6).double(), exact * w.double(), rtol=1e-5, atol=1e-6
    )
    unit = norm_rope.l2_norm(x, torch.tensor(32**-0.5)).double()
    expected = x.double() * (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(unit, expected, rtol=1e-5, atol=1e-6)


def test_zero_rows_stay_zero() -> None:
    """The hidden in front of row 0 and the padding rows are zeros: norms must not make NaN of them."""
    zeros = torch.zeros(2, 4, 16)
    assert not norm_rope.l2_norm(zeros, torch.tensor(0.25)).any()
    assert not norm_rope.rms_norm(zeros, torch.ones(16), 1e-6).any()


def _rotate(x: Tensor, positions: Tensor, rotary: int, theta: float) -> Tensor:
    """NeoX RoPE the long way, float64."""
    out = x.clone()
    for i in range(rotary // 2):
        angle = positions.double() * theta ** (-2 * i / rotary)
        a, b = x[..., i], x[..., i + rotary // 2]
        out[..., i] = a * angle.cos()[:, None] - b * angle.sin()[:, None]
        out[..., i + rotary // 2] = b * angle.cos()[:, None] + a * angle.sin()[:, None]
    return out


def test_rope_turns_the_leading_part_only() -> None:
    generator = torch.Generator().manual_seed(4)
    x, scale = torch.randn(9, 3, 32, generator=generator), torch.rand(3, 32, generator=generator) + 0.5
    positions = torch.tensor([0, 1, 2, 63, 64, 65, 500, 1000, 4095])
    table = norm_rope.rope_table(8, 10_000.0, 4096)
    normed = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * scale.double()
    got = norm_rope.qk_norm_rope(x, scale, table[positions], 1e-6)
    torch.testing.assert_close(got.double(), _rotate(normed, positions, 8, 10_000.0), rtol=1e-4, atol=2e-4)
    assert torch.equal(got[..., 8:], norm_rope.qk_norm_rope(x, scale, table[positions * 0], 1e-6)[..., 8:])


def test_rope_keeps_bits() -> None:
    generator = torch.Generator().manual_seed(5)
    wide, scale = torch.randn(160, 6 * 32 + 5, generator=generator), torch.rand(6, 32, generator=generator)
    angles = norm_rope.rope_table(8, 10_000.0, 160)
    assert_row_exact(
        lambda rows, at: norm_rope.qk_norm_rope(rows[:, : 6 * 32].reshape(-1, 6, 32), scale, at, 1e-6),
        [wide, angles],
    )


def test_rope_without_a_norm() -> None:
    generator = torch.Generator().manual_seed(6)
    x, scale = torch.randn(160, 3, 32, generator=generator), torch.tensor([0.25, 0.25, 1.0])[:, None]
    table = norm_rope.rope_table(32, 10_000.0, 160)
    got = norm_rope.qk_rope(x, scale, table)
    expected = _rotate(x.double() * scale, torch.arange(160), 32, 10_000.0)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    assert_row_exact(lambda rows, at: norm_rope.qk_rope(rows, scale, at), [x, table])


def test_parts_are_added_in_order_and_rounded_once() -> None:
    def added(*values: float) -> float:
        return norm_rope.added(torch.tensor(values)[:, None, None], torch.bfloat16).item()

    assert added(1.0, 2.0**-8, 2.0**-9) == 1.0 + 2.0**-7, "each addition rounded would leave 1"
    assert added(1e8, 1.0, -1e8) == 0.0, "in another order 1 would be left"


def test_a_product_as_it_is_stays_so() -> None:
    whole = torch.ones(2, 3, dtype=torch.bfloat16)
    assert norm_rope.added(whole, torch.float32) is whole
