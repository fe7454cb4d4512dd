"""The card's activations in Triton's interpreter, float32, against their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.activation import device, reference
from kernels.testing import assert_equal_bits

EDGES = torch.tensor(
    [-1e4, -200.0, -89.0, -20.0, -1.0, -1e-8, 0.0, 1e-8, 1.0, 20.0, 89.0, 200.0, 1e4, 0.5, 2.0, -3.0]
)


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 4


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 24), (2, 1032)])
def test_swiglu_is_the_twin(nan_filled_empty: None, rows: int, width: int) -> None:
    gate_up = _draw(rows, 2 * width)
    torch.testing.assert_close(device.swiglu(gate_up), reference.swiglu(gate_up), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_swiglu_at_the_edges() -> None:
    gate_up = torch.cat([EDGES, torch.ones(16)])[None]
    torch.testing.assert_close(device.swiglu(gate_up), reference.swiglu(gate_up), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("width", [8, 40, 1048])
def test_sigmoid_gate_reads_column_views(nan_filled_empty: None, width: int) -> None:
    x, wide = _draw(3, width), _draw(3, width + 16)
    gate = wide[:, 8 : 8 + width]
    got = device.sigmoid_gate(x, gate)
    torch.testing.assert_close(got, reference.sigmoid_gate(x, gate), rtol=1e-5, atol=1e-6)
    assert_equal_bits(device.sigmoid_gate(x[1:2], gate[1:2]), got[1:2], "one row")


@pytest.mark.parametrize("heads", [1, 4, 6])
def test_delta_gates_are_the_twins(nan_filled_empty: None, heads: int) -> None:
    wide, rate, bias = _draw(5, 2 * heads + 3), _draw(heads).abs(), _draw(heads)
    b, a = wide[:, :heads], wide[:, heads : 2 * heads]
    for got, expected in zip(
        device.delta_gates(b, a, rate, bias), reference.delta_gates(b, a, rate, bias), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_softplus_keeps_its_small_end() -> None:
    """g must stay tiny, not 0, for strongly negative a: log(1 + e) alone would lose it."""
    a = torch.full((1, 8), -17.0)
    _, g = device.delta_gates(a, a, torch.ones(8), torch.zeros(8))
    torch.testing.assert_close(
        g.double(), -torch.exp(torch.tensor(-17.0)).double().expand(1, 8), rtol=1e-5, atol=0
    )
