"""How attention on a card reads the pages of a plane: whole, by the tensor copy engine.

A page's rows past the last written one are read too. Keys among them are hidden by position; values are zeros, because
the launch that writes rows zeroes the rest of the last page (`card_write`): 0 x NaN would be NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.tiles import ROWS

LOG2E = tl.constexpr(1.4426950408889634)


def pages(plane: Tensor) -> TensorDescriptor:
    """A plane [blocks, kv_heads, 64, d] as rows [blocks * kv_heads * 64, d], read a page at a time.

    Raises ValueError for rows that are no multiple of 16 bytes.
    """
    width = plane.shape[3]
    if width * plane.element_size() % 16:
        raise ValueError(f"a head of {width} elements is no multiple of 16 bytes")
    block = [ROWS, max(16, triton.next_power_of_2(width))]
    return TensorDescriptor(plane, [plane.numel() // width, width], [width, 1], block)


def precision(x: Tensor) -> str:
    """How float32 operands of a product are taken; bfloat16 ones are as they are."""
    return "tf32" if x.dtype == torch.bfloat16 else "ieee"
