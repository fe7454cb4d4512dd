"""Ready rows written into their pages: the latent rows, which are keys and values at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import PDL
from kernels.paged_attention.plan import CardAttention
from kernels.tiles import ROWS


@triton.jit(do_not_specialize=["columns", "table_row"])
def _rows_kernel(
    rows,
    plane,
    tables,
    starts,
    counts,
    columns,
    table_row,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row). Attention reads whole pages: the newest row zeroes what lies behind it."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    sequence, t = row // columns, row % columns
    count = tl.load(counts + sequence)
    if t >= count:
        return
    position = tl.load(starts + sequence) + t
    block = tl.load(tables + sequence * table_row + position // PAGE).to(tl.int64)
    at = (block * PAGE + position % PAGE) * D
    d = tl.arange(0, BLOCK_D)
    tl.store(plane + at + d, tl.load(rows + row.to(tl.int64) * D + d, mask=d < D, other=0.0), mask=d < D)
    if t == count - 1:
        for behind in range(1, PAGE - position % PAGE):
            tl.store(plane + at + behind * D + d, tl.zeros([BLOCK_D], plane.dtype.element_ty), mask=d < D)


def write(rows: Tensor, plane: Tensor, card: CardAttention) -> None:
    """rows [S * columns, d] contiguous -> plane [blocks, 1, 64, d]; rows that are padding write nothing."""
    width = plane.shape[3]
    if plane.shape[1] != 1 or tuple(rows.shape[1:]) != (width,) or not rows.is_contiguous():
        raise ValueError(f"rows {tuple(rows.shape)} do not fit a plane of one head, {width} wide")
    _rows_kernel[(rows.shape[0],)](
        rows,
        plane,
        card.block_tables,
        card.starts,
        card.counts,
        card.columns,
        card.block_tables.stride(0),
        D=width,
        BLOCK_D=triton.next_power_of_2(width),
        PAGE=ROWS,
        num_warps=1,
        **PDL,
    )
