"""Writes a safetensors file in bfloat16, one tensor at a time: memory holds one tensor, whatever the model's size.

u64 little-endian: bytes of the header     the header: JSON, name -> dtype, shape, data_offsets     the data, packed
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from services.models.faults import ModelFault

_WIDTH: Final = 2
_ALIGNMENT: Final = 8


def write(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], NDArray[np.float32]],
    *,
    done: Callable[[int], None] = lambda count: None,
) -> None:
    """Make `path` and have it on the disk. `read` gives a tensor of the shape told; `done` gets how many bytes were written.

    Raises:
        ModelFault: a tensor has another shape, or values that are not finite.
        OSError: no room, or no right to write.
    """
    with path.open("wb") as file:
        file.write(_header(shapes))
        for name, shape in shapes.items():
            values = read(name)
            if values.shape != shape:
                raise ModelFault(f"{path}: tensor {name} has shape {values.shape}, expected {shape}")
            if not np.isfinite(values).all():
                raise ModelFault(f"{path}: tensor {name} has values that are not finite")
            data = rounded(values).tobytes()
            file.write(data)
            done(len(data))
        file.flush()
        os.fsync(file.fileno())


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even, as torch rounds. Values are finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype("<u2")


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape) * _WIDTH
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
