"""The gated delta net between its two products: convolution and gates, chunked prefill on the 64-grid, replay of decode."""

from torch import Tensor

from kernels.dispatch import device_module, on_card
from kernels.gated_delta import reference
from kernels.gated_delta.plan import CardReplay, DeltaShape, MixWeights, ReplayPlan
from kernels.gated_delta.reference import chunk_prefill, qk_scale, replay_step

__all__ = [
    "CardReplay",
    "DeltaShape",
    "MixWeights",
    "ReplayPlan",
    "chunk_prefill",
    "decode",
    "fold",
    "prefill",
    "qk_scale",
    "replay_step",
]


def decode(
    y: Tensor,
    weights: MixWeights,
    state: Tensor,
    store: Tensor,
    windows: Tensor,
    plan: ReplayPlan,
    shape: DeltaShape,
    scale: Tensor,
) -> Tensor:
    """New rows of several slots; see the twin. On a card float32 o, and `store` and `windows` are rings."""
    chosen = device_module("gated_delta") if on_card(y) else reference
    return chosen.decode(y, weights, state, store, windows, plan, shape, scale)


def prefill(
    y: Tensor,
    weights: MixWeights,
    state: Tensor,
    window: Tensor,
    rows: int,
    shape: DeltaShape,
    scale: Tensor,
) -> Tensor:
    """Rows of one slot from the grid on; see the twin. On a card o has the type of y."""
    chosen = device_module("gated_delta") if on_card(y) else reference
    return chosen.prefill(y, weights, state, window, rows, shape, scale)


def fold(state: Tensor, store: Tensor, plan: ReplayPlan, shape: DeltaShape, scale: Tensor) -> None:
    """Only fold the pending rows into the states."""
    chosen = device_module("gated_delta") if on_card(state) else reference
    chosen.fold(state, store, plan, shape, scale)
