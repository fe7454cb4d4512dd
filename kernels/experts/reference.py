"""A mixture of experts in torch, row by row exact: the definition that the device kernels must meet, up to rounding.

    route    p = softmax(logits) over all experts in float32; the k largest; divided by their sum if asked for
    experts  y = sum over ranks r = 0..k-1, in that order and in float32, of w_r * down_e(silu(gate_e x) * up_e x)
             and, behind it, sigmoid(g) * shared

No expert has a capacity: nothing is dropped, so that a row's result does not depend on the rows beside it (C1.6).
Rows of one expert share a product, whose bits are a row's own by the matmul's recipe.
"""

from __future__ import annotations

from torch import Tensor

from kernels.activation.reference import sigmoid, swiglu
from kernels.experts.packed import PackedExperts, Routes
from kernels.matmul import reference as matmul
from kernels.matmul.packed import Recipe


def pack(gate_up: Tensor, down: Tensor, recipe: Recipe) -> PackedExperts:
    """Lay out gate_up [E, 2I, H] (gate rows, then up rows) and down [E, H, I]."""
    count, hidden, width = down.shape
    each = tuple(
        (matmul.pack(first, recipe), matmul.pack(second, recipe))
        for first, second in zip(gate_up, down, strict=True)
    )
    return PackedExperts(recipe, count, hidden, width, each=each)


def route(logits: Tensor, k: int, *, renormalise: bool = True) -> Routes:
    """float32 [M, E] -> the k best experts of each row."""
    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    raised = (ordered - ordered[:, :1]).exp()
    weights = raised[:, :k] / raised.sum(dim=1, keepdim=True)
    if renormalise:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return Routes(ids[:, :k].int(), weights)


def experts(
    x: Tensor,
    routes: Routes,
    packed: PackedExperts,
    *,
    prefill: bool = False,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """[M, H] -> [M, H]; `shared` [M, H] is the shared expert's result and `shared_gate` [M, 1] the logit of its weight."""
    rows, k = routes.ids.shape
    parts = x.new_empty(rows, k, packed.hidden)
    for expert, (gate_up, down) in enumerate(packed.each):
        row, place = (routes.ids == expert).nonzero(as_tuple=True)
        if len(row):
            hidden = swiglu(matmul.linear(x[row].contiguous(), gate_up))
            parts[row, place] = matmul.linear(hidden, down)
    total = routes.weights[:, 0, None] * parts[:, 0]
    for rank in range(1, k):
        total = total + routes.weights[:, rank, None] * parts[:, rank]
    if shared is not None:
        total = total + (shared if shared_gate is None else sigmoid(shared_gate) * shared)
    return total
