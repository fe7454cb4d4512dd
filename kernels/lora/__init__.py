"""Low-rank adapters: each row its own, or none."""

from torch import Tensor

from kernels.dispatch import device_module, on_card
from kernels.lora import reference
from kernels.lora.slots import NONE, AdapterRows, AdapterSlots
from kernels.matmul.packed import Recipe

__all__ = ["NONE", "AdapterRows", "AdapterSlots", "add", "load", "rows_of", "slots", "unload"]


def slots(count: int, rank: int, n: int, k: int, recipe: Recipe, like: Tensor) -> AdapterSlots:
    """Empty slots for a weight [n, k]; `like` gives device and type."""
    return (device_module("lora") if on_card(like) else reference).slots(count, rank, n, k, recipe, like)


def load(into: AdapterSlots, slot: int, a: Tensor, b: Tensor, scale: float) -> None:
    """Fill a slot with A [r, K], B [N, r]. Raises ValueError when the rank does not fit."""
    (device_module("lora") if on_card(into.scale) else reference).load(into, slot, a, b, scale)


def unload(into: AdapterSlots, slot: int) -> None:
    """Empty a slot; no row may use it from here on."""
    (device_module("lora") if on_card(into.scale) else reference).unload(into, slot)


def rows_of(index: Tensor, count: int, *, prefill: bool = False) -> AdapterRows:
    """`index` int32 [M]: each row's slot of `count`, NONE for none; `prefill` names the phase."""
    return (device_module("lora") if on_card(index) else reference).rows_of(index, count, prefill=prefill)


def add(base: Tensor, x: Tensor, adapters: AdapterSlots, rows: AdapterRows) -> Tensor:
    """Adds to `base` [M, N] in place what the rows' adapters make of x [M, K]; see the twin."""
    return (device_module("lora") if on_card(base) else reference).add(base, x, adapters, rows)
