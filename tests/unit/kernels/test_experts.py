"""The mixture's twin: against a dense loop over experts, ties, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.experts import Routes, experts, pack, route
from kernels.experts.packed import PackedExperts
from kernels.matmul.packed import Recipe
from kernels.testing import assert_row_exact

EXPERTS, HIDDEN, WIDTH, K = 6, 32, 24, 3


def _weights(recipe: Recipe = "onednn") -> tuple[Tensor, Tensor, PackedExperts]:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) * WIDTH**-0.5
    return gate_up, down, pack(gate_up, down, recipe)


def test_values_against_a_loop_over_rows() -> None:
    gate_up, down, packed = _weights()
    generator = torch.Generator().manual_seed(2)
    x, logits = torch.randn(9, HIDDEN, generator=generator), torch.randn(9, EXPERTS, generator=generator)
    shared, gate = torch.randn(9, HIDDEN, generator=generator), torch.randn(9, 1, generator=generator)
    told = experts(x, route(logits, K), packed, shared=shared, shared_gate=gate)
    for row in range(9):
        weights, ids = logits[row].double().softmax(0).topk(K)
        total = gate[row].double().sigmoid() * shared[row].double()
        for weight, expert in zip(weights / weights.sum(), ids, strict=True):
            first, second = (gate_up[expert].double() @ x[row].double()).chunk(2)
            total = total + weight * (down[expert].double() @ (torch.nn.functional.silu(first) * second))
        torch.testing.assert_close(told[row].double(), total, rtol=1e-5, atol=1e-6)


def test_ties_go_to_the_smallest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0, 3.0, 1.0]])
    told = route(logits, 4)
    assert told.ids.tolist() == [[1, 3, 4, 0]]
    assert told.weights.sum().item() == pytest.approx(1.0)


def test_weights_may_stay_as_the_softmax_left_them() -> None:
    logits = torch.randn(5, EXPERTS, generator=torch.Generator().manual_seed(3))
    told = route(logits, 2, renormalise=False)
    torch.testing.assert_close(told.weights, logits.softmax(1).topk(2).values)


def test_an_expert_may_take_every_row() -> None:
    """No capacity: all rows at one expert are all computed."""
    _, _, packed = _weights()
    x = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(4))
    logits = torch.zeros(70, EXPERTS)
    logits[:, 5] = 9.0
    routes = route(logits, 1)
    told = experts(x, routes, packed)
    alone = torch.cat(
        [
            experts(x[n : n + 1], Routes(routes.ids[n : n + 1], routes.weights[n : n + 1]), packed)
            for n in range(70)
        ]
    )
    assert torch.equal(told, alone)


def test_a_row_keeps_its_bits() -> None:
    _, _, packed = _weights()
    generator = torch.Generator().manual_seed(5)
    x, logits = torch.randn(140, HIDDEN, generator=generator), torch.randn(140, EXPERTS, generator=generator)

    def run(rows: Tensor, scores: Tensor) -> Tensor:
        return experts(rows, route(scores, K), packed)

    assert_row_exact(run, [x, logits])
