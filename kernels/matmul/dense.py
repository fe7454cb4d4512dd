"""The prefill product: a [128, 128 or 256] tile a program over all of K, fed by the copy engine."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.matmul.stream import store_tile


@triton.jit(do_not_specialize=["rows"])
def dense_kernel(
    x, weight, out, scale, rows,
    N: tl.constexpr, UNIT_ROWS: tl.constexpr, UNIT_COLUMNS: tl.constexpr, STEPS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """out[rows, N] = x[rows, K] @ weight.T for one row block and WIDE units of N. Grid (row blocks * TILES,).

    x a descriptor of [rows, K], weight one of [units, UNIT_ROWS, UNIT_COLUMNS] as 2-D; what lies outside reads as zero.
    Programs walk down `GROUP` row blocks before they move to the next column tile, so that weights stay in the L2.
    """
    program, blocks = tl.program_id(0), tl.cdiv(rows, BLOCK_M)
    band = program // (GROUP * TILES)
    height = tl.minimum(blocks - band * GROUP, GROUP)
    block = band * GROUP + program % (GROUP * TILES) % height
    tile = program % (GROUP * TILES) // height
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    left, right = WIDE * tile * STEPS, (WIDE * tile + 1) * STEPS
    acc = tl.zeros((BLOCK_M, UNIT_ROWS), tl.float32)
    beside = tl.zeros((BLOCK_M, UNIT_ROWS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        taken = x.load([block * BLOCK_M, step * UNIT_COLUMNS])
        unit = weight.load([(left + step) * UNIT_ROWS, 0])
        if WIDE == 2:
            # Next to the other loads, so that the three share a barrier.
            other = weight.load([(right + step) * UNIT_ROWS, 0])
            acc = tl.dot(taken, tl.trans(unit.to(taken.dtype)), acc)
            beside = tl.dot(taken, tl.trans(other.to(taken.dtype)), beside)
        else:
            acc = tl.dot(taken, tl.trans(unit.to(taken.dtype)), acc)
    store_tile(acc, out, scale, WIDE * tile * UNIT_ROWS, row, rows, N, PAIRS, SCALED)
    if WIDE == 2:
        store_tile(beside, out, scale, (WIDE * tile + 1) * UNIT_ROWS, row, rows, N, PAIRS, SCALED)
