"""A mixture of experts: the router's choice and the grouped products, a row's bits its own."""

from torch import Tensor

from kernels.dispatch import device_module, on_card
from kernels.experts import reference
from kernels.experts.grouped import route_grouped
from kernels.experts.packed import PackedExperts, Routes
from kernels.matmul.packed import Recipe

__all__ = ["PackedExperts", "Routes", "experts", "pack", "route", "route_grouped"]


def pack(gate_up: Tensor, down: Tensor, recipe: Recipe) -> PackedExperts:
    """Lay out gate_up [E, 2I, H] (gate rows, then up rows) and down [E, H, I]."""
    return (device_module("experts") if on_card(down) else reference).pack(gate_up, down, recipe)


def route(logits: Tensor, k: int, *, renormalise: bool = True) -> Routes:
    """float32 router logits [M, E] -> the k best experts of each row; see the twin."""
    chosen = device_module("experts") if on_card(logits) else reference
    return chosen.route(logits, k, renormalise=renormalise)


def experts(
    x: Tensor,
    routes: Routes,
    packed: PackedExperts,
    *,
    prefill: bool = False,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """The mixture's result [M, H]; see the twin. `prefill` names the phase, whose tiles and bits may be others."""
    chosen = device_module("experts") if on_card(x) else reference
    return chosen.experts(x, routes, packed, prefill=prefill, shared=shared, shared_gate=shared_gate)
