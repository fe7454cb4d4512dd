"""Activations: right values, and bits that do not depend on the element count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import activation
from kernels.testing import WIDTHS, assert_row_exact

EDGES = torch.tensor([-1e4, -200.0, -89.0, -20.0, -1.0, -1e-8, 0.0, 1e-8, 1.0, 20.0, 89.0, 200.0, 1e4])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(activation.sigmoid, torch.sigmoid), (activation.silu, F.silu), (activation.softplus, F.softplus)],
    ids=["sigmoid", "silu", "softplus"],
)
def test_values(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat([EDGES, torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 8])
    torch.testing.assert_close(ours(x).double(), theirs(x.double()), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_rows_keep_their_bits(name: str, width: int) -> None:
    assert_row_exact(
        getattr(activation, name), [torch.randn(160, width, generator=torch.Generator().manual_seed(2))]
    )


@pytest.mark.parametrize("width", [8, 20, 256])
def test_gates_keep_their_bits_on_column_slices(width: int) -> None:
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(160, 3 * width + 1, generator=generator)
    rate, bias = torch.rand(width, generator=generator), torch.randn(width, generator=generator)

    def gates(rows: Tensor) -> Tensor:
        return torch.cat(
            activation.delta_gates(rows[:, 1 : width + 1], rows[:, width + 1 : 2 * width + 1], rate, bias), -1
        )

    assert_row_exact(gates, [wide])
    assert_row_exact(activation.swiglu, [wide[:, : 2 * width].contiguous()])
    assert_row_exact(
        lambda rows: activation.sigmoid_gate(rows[:, :width], rows[:, width : 2 * width]), [wide]
    )


def test_delta_gates_formula() -> None:
    b, a = torch.randn(5, 4), torch.randn(5, 4)
    a_log, bias = torch.randn(4), torch.randn(4)
    beta, g = activation.delta_gates(b, a, a_log.exp(), bias)
    torch.testing.assert_close(beta, torch.sigmoid(b))
    torch.testing.assert_close(g, -a_log.exp() * F.softplus(a + bias))


def test_geglu_is_the_tanh_form_of_gelu() -> None:
    gate = torch.cat([EDGES, torch.randn(1000, generator=torch.Generator().manual_seed(4)) * 4])
    up = torch.ones_like(gate)
    got = activation.geglu(torch.cat([gate, up])[None])[0]
    expected = F.gelu(gate.double(), approximate="tanh")
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=1e-10)


def test_soft_cap_bounds_and_keeps_the_order() -> None:
    x = torch.linspace(-200, 200, 1001)
    got = activation.soft_cap(x.clone(), 30.0)
    torch.testing.assert_close(got.double(), (x.double() / 30).tanh() * 30, rtol=1e-6, atol=1e-6)
    assert got.abs().max() <= 30
    assert (got.diff() >= 0).all()


@pytest.mark.parametrize("width", [*WIDTHS, 300])
def test_geglu_and_soft_cap_keep_their_bits(width: int) -> None:
    rows = torch.randn(160, 2 * width, generator=torch.Generator().manual_seed(5))
    assert_row_exact(activation.geglu, [rows])
    assert_row_exact(lambda x: activation.soft_cap(x.clone(), 30.0), [rows])
