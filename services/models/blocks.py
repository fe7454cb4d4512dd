"""The block formats of GGUF that are read here, and what their bytes mean. All numbers are little-endian.

    F32     one float32
    Q8_0    32 values: scale d f16, 32 x i8 q                     x = d q
    Q4_1    32 values: scale d f16, least m f16, 16 bytes         x = d q + m, q = the low nibbles, then the high ones

As in ggml (`ggml-quants.c`), where d and m are widened to float32 before they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
BLOCK: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """`values` values stand in `width` bytes; `decode` makes float32 of whole blocks."""

    name: str
    values: int
    width: int
    decode: Callable[[bytes], Floats]

    def size(self, count: int) -> int:
        """Bytes of `count` values, a multiple of `values`."""
        return count // self.values * self.width


def _f32(raw: bytes) -> Floats:
    return np.frombuffer(raw, "<f4").astype(np.float32)


def _q8_0(raw: bytes) -> Floats:
    blocks = np.frombuffer(raw, np.dtype([("d", "<f2"), ("q", "i1", BLOCK)]))
    values: Floats = blocks["d"].astype(np.float32)[:, None] * blocks["q"].astype(np.float32)
    return values.reshape(-1)


def _q4_1(raw: bytes) -> Floats:
    blocks = np.frombuffer(raw, np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", BLOCK // 2)]))
    codes = np.concatenate((blocks["q"] & 0x0F, blocks["q"] >> 4), axis=1).astype(np.float32)
    scale, least = (blocks[name].astype(np.float32)[:, None] for name in ("d", "m"))
    values: Floats = codes * scale + least
    return values.reshape(-1)


FORMATS: Final = {
    0: BlockFormat(name="F32", values=1, width=4, decode=_f32),
    3: BlockFormat(name="Q4_1", values=BLOCK, width=20, decode=_q4_1),
    8: BlockFormat(name="Q8_0", values=BLOCK, width=34, decode=_q8_0),
}
"""By ggml's number of the format."""
