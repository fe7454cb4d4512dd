"""Where an operation runs: the torch twin on the CPU, the device kernel on a card.

A package's `__init__` asks `on_card` and calls one of the two; callers never choose. Device modules import triton, which
a CPU install does not have, so they are imported by the first call that needs them (`device_module`).
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

INTERPRETED = False
"""Set by tests alone, under TRITON_INTERPRET=1: triton's interpreter is the card, whose memory is the CPU's."""


def on_card(x: Tensor) -> bool:
    """Whether the operation on `x` is a device kernel's."""
    return x.is_cuda or INTERPRETED


@lru_cache(maxsize=32)
def device_module(operation: str) -> ModuleType:
    """`kernels.<operation>.device`, imported on first use. Raises ImportError where triton is missing."""
    return import_module(f"kernels.{operation}.device")
