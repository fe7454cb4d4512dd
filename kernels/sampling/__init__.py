"""Position-keyed sampling: Philox noise, and the pick of a token from a row of logits."""

from torch import Tensor

from kernels.dispatch import device_module, on_card
from kernels.sampling import reference
from kernels.sampling.plan import TOP_K_LIMIT, PickPlan, Picks, device_pickable
from kernels.sampling.reference import STREAM_TARGET, gumbel, philox4x32

__all__ = [
    "STREAM_TARGET",
    "TOP_K_LIMIT",
    "PickPlan",
    "Picks",
    "device_pickable",
    "gumbel",
    "philox4x32",
    "pick",
]


def pick(logits: Tensor, plan: PickPlan, *, id_map: Tensor | None = None, logprobs: bool = False) -> Picks:
    """A token from every row of `logits` [S x columns, V] float32; see the twin."""
    chosen = device_module("sampling") if on_card(logits) else reference
    return chosen.pick(logits, plan, id_map=id_map, logprobs=logprobs)
