"""What every launcher of a device kernel checks: rows that one binary serves, and whether launches may overlap.

Triton compiles another binary where an address or a stride is not a multiple of 16, and another binary may add in another
order. So launchers pass strides in steps of 8 elements and refuse what does not fit, instead of letting a view of one row
pick its own code.
"""

from __future__ import annotations

import os
from typing import Any, Final

from torch import Tensor

STEP: Final = 8
"""Elements in a step of a row stride: 16 bytes of bfloat16."""

OVERLAP: Final = os.environ.get("TRITON_INTERPRET") != "1"
"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits before it reads its inputs.
The interpreter has no such instructions."""

PDL: Final[dict[str, Any]] = {"OVERLAP": OVERLAP, **({"launch_pdl": True} if OVERLAP else {})}
"""Options of a kernel that starts so."""


def row_steps(x: Tensor) -> int:
    """The stride of dimension 0 in steps of `STEP` elements; 0 for a single row.

    Raises ValueError for rows that are not contiguous, start off 16 bytes or are not whole steps apart.
    """
    width = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != width:
            raise ValueError(f"a row of shape {tuple(x.shape[1:])} has strides {x.stride()[1:]}")
        width *= size
    if x.data_ptr() % 16:
        raise ValueError("rows must start at a multiple of 16 bytes")
    if x.shape[0] <= 1:
        return 0
    if x.stride(0) % STEP:
        raise ValueError(f"rows are {x.stride(0)} elements apart, which is no multiple of {STEP}")
    return x.stride(0) // STEP
