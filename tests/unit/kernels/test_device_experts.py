"""The mixture as device kernels, interpreted, against its twin; bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.experts import Routes, device, reference


def _weights(experts: int, hidden: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(experts)
    gate_up = torch.randn(experts, 2 * width, hidden, generator=generator) * hidden**-0.5
    return gate_up, torch.randn(experts, hidden, width, generator=generator) * width**-0.5


def _inputs(rows: int, hidden: int, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, hidden, generator=generator),
        torch.randn(rows, experts, generator=generator),
        torch.randn(rows, hidden, generator=generator),
        torch.randn(rows, 1, generator=generator),
    )


@pytest.mark.parametrize(("rows", "experts", "k"), [(1, 5, 2), (7, 8, 3), (40, 12, 4)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_routes_are_the_twins(rows: int, experts: int, k: int, renormalise: bool) -> None:
    logits = _inputs(rows, 8, experts)[1].mul(2).round()  # many ties
    told = device.route(logits, k, renormalise=renormalise)
    expected = reference.route(logits, k, renormalise=renormalise)
    assert torch.equal(told.ids, expected.ids)
    torch.testing.assert_close(told.weights, expected.weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "k", "hidden", "width"),
    [(1, 4, 2, 24, 40), (9, 8, 3, 72, 20), (70, 4, 2, 40, 24)],
)
def test_values(rows: int, experts: int, k: int, hidden: int, width: int, prefill: bool) -> None:
    gate_up, down = _weights(experts, hidden, width)
    x, logits, shared, gate = _inputs(rows, hidden, experts)
    routes = reference.route(logits, k)
    told = device.experts(
        x, routes, device.pack(gate_up, down, "card"), prefill=prefill, shared=shared, shared_gate=gate
    )
    exact = torch.zeros(rows, hidden, dtype=torch.float64)
    for row in range(rows):
        exact[row] = gate[row].double().sigmoid() * shared[row].double()
        for weight, expert in zip(routes.weights[row].double(), routes.ids[row], strict=True):
            first, second = (gate_up[expert].double() @ x[row].double()).chunk(2)
            exact[row] += weight * (down[expert].double() @ (torch.nn.functional.silu(first) * second))
    assert (told.double() - exact).norm() / exact.norm() < 1e-6


@pytest.mark.parametrize("prefill", [False, True])
def test_a_row_keeps_its_bits(prefill: bool) -> None:
    """Alone, among others, at another row, beside NaN; experts that are crowded and experts that are empty."""
    packed = device.pack(*_weights(6, 40, 24), "card")
    x, logits, _, _ = _inputs(45, 40, 6)
    logits[:, 5], logits[:, 4] = -9.0, logits[:, 4] + 2
    routes = device.route(logits, 2)
    whole = device.experts(x, routes, packed, prefill=prefill)
    for first, count in ((0, 1), (44, 1), (3, 17), (20, 25)):
        rows = slice(first, first + count)
        part = Routes(routes.ids[rows].clone(), routes.weights[rows].clone())
        told = device.experts(x[rows].clone(), part, packed, prefill=prefill)
        assert torch.equal(told, whole[rows])
    bad, scores = x.clone(), logits.clone()
    bad[7], scores[7, 2] = torch.nan, torch.nan
    told = device.experts(bad, device.route(scores, 2), packed, prefill=prefill)
    assert told[7].isnan().all()
    others = torch.arange(45) != 7
    assert torch.equal(told[others], whole[others])


def test_without_a_shared_expert_nothing_is_added() -> None:
    packed = device.pack(*_weights(4, 24, 16), "card")
    x, logits, shared, _ = _inputs(5, 24, 4)
    routes = device.route(logits, 2)
    alone = device.experts(x, routes, packed)
    told = device.experts(x, routes, packed, shared=shared)
    torch.testing.assert_close(told - shared, alone, rtol=1e-5, atol=1e-5)


def test_other_recipes_are_refused() -> None:
    with pytest.raises(ValueError, match="no recipe"):
        device.pack(*_weights(2, 8, 8), "onednn")
