"""The prefill product: one [BLOCK_M, BLOCK_N] tile a program over all of K, in an order that keeps weights in the L2."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.matmul.sliced import store_tile


@triton.jit(do_not_specialize=["rows"])
def dense_kernel(
    x, weight, out, scale, rows,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[rows, N] = x[rows, K] @ weight.T; weight [TILES, STEPS, BLOCK_N, BLOCK_K]. Grid (row blocks * TILES,).

    Programs walk `GROUP` row blocks down before they move to the next column tile.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(rows, BLOCK_M)
    band = program // (GROUP * TILES)
    height = tl.minimum(blocks - band * GROUP, GROUP)
    block = band * GROUP + program % (GROUP * TILES) % height
    tile = program % (GROUP * TILES) // height
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    rows_at = x + row.to(tl.int64)[:, None] * K + inner[None, :]
    unit_at = weight + tl.arange(0, BLOCK_N)[None, :] * BLOCK_K + inner[:, None]
    live = (row < rows)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        unit = tl.load(unit_at + (tile * STEPS + step).to(tl.int64) * (BLOCK_N * BLOCK_K))
        mask = live if K == STEPS * BLOCK_K else live & (step * BLOCK_K + inner < K)[None, :]
        taken = tl.load(rows_at + step * BLOCK_K, mask=mask, other=0.0)
        acc = tl.dot(taken, unit.to(taken.dtype), acc)
    store_tile(acc, out, scale, tile * BLOCK_N, row, rows, N, PAIRS, SCALED)
