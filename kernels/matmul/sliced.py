"""The decode product: a program streams one slice of K of one column tile through a tile of rows.

How many slices a weight has is a function of (N, K). The slices of a tile are added in ascending order by whichever of
their programs arrives last, so the bits do not tell who that was. Rows per tile, units per step and which operand is
turned change nothing either (measured: each output is one ascending chain of K on the tensor cores), so they follow speed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def prefetch_unit(at, BYTES: tl.constexpr):
    """Ask the L2 for a unit of the weight."""
    line = at.to(tl.int64) + tl.arange(0, BYTES // 128) * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up in float32; exp overflows to inf below -88, which gives the right 0."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def store_tile(acc, out, scale, first, row, rows, N: tl.constexpr, PAIRS: tl.constexpr, SCALED: tl.constexpr):
    """Finish a float32 tile [rows, columns from `first` on]: channel scales, the pair's activation, one rounding."""
    WIDTH: tl.constexpr = acc.shape[1]
    column = first + tl.arange(0, WIDTH)
    if SCALED:
        acc *= tl.load(scale + column, mask=column < N, other=0.0)[None, :]
    if PAIRS:
        gate, up = tl.split(tl.reshape(acc, (acc.shape[0], WIDTH // 2, 2)))
        acc = silu_times(gate, up)
        column = first // 2 + tl.arange(0, WIDTH // 2)
    OUT: tl.constexpr = N // 2 if PAIRS else N
    at = row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < OUT)[None, :])


@triton.jit
def join_slices(
    acc, out, scale, parts, arrivals, tile, slice_, block, row, rows,
    N: tl.constexpr, TILES: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Leave this slice's part; the last program of a tile to arrive adds all parts in order and stores the tile."""
    ROWS: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    within = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    live = (row < rows)[:, None]
    at = block * TILES + tile
    parts += at.to(tl.int64) * (SLICES * ROWS * WIDTH) + within
    tl.store(parts + slice_ * (ROWS * WIDTH), acc, mask=live)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + at, 1, sem="acq_rel") == SLICES - 1:
        # Past the L1, which may hold the lines of an earlier product.
        total = tl.load(parts, mask=live, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SLICES):
            total += tl.load(parts + other * (ROWS * WIDTH), mask=live, other=0.0, cache_modifier=".cg")
        store_tile(total, out, scale, tile * WIDTH, row, rows, N, PAIRS, SCALED)
        tl.store(arrivals + at, 0)


@triton.jit(do_not_specialize=["rows"])
def sliced_kernel(
    x, weight, out, scale, parts, arrivals, rows,
    N: tl.constexpr, K: tl.constexpr, UNIT_ROWS: tl.constexpr, UNIT_COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    TILES: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, EARLY: tl.constexpr,
    PAIRS: tl.constexpr, SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[rows, N] = x[rows, K] @ weight.T for one row block, one column tile of WIDE units and one slice of K.

    weight [units of N, STEPS, UNIT_ROWS, UNIT_COLUMNS], zero-padded to an even STEPS; TILES column tiles; parts float32
    [row blocks, TILES, SLICES, tile]; arrivals int32 [row blocks, TILES], zero before and after. A step takes DEEP units of
    K. SWAP: the weight is the instruction's left operand, so few rows make a small tile. EARLY: units per tile row that
    are asked for before the wait for the kernel that makes x. Grid (row blocks, TILES * SLICES).
    """
    UNIT: tl.constexpr = UNIT_ROWS * UNIT_COLUMNS
    HEIGHT: tl.constexpr = WIDE * UNIT_ROWS
    LENGTH: tl.constexpr = DEEP * UNIT_COLUMNS
    PAIRED: tl.constexpr = STEPS // 2
    block, program = tl.program_id(0), tl.program_id(1)
    tile, slice_ = program // SLICES, program % SLICES
    first = slice_ * PAIRED // SLICES * (2 // DEEP)
    last = (slice_ + 1) * PAIRED // SLICES * (2 // DEEP)
    inner = tl.arange(0, LENGTH)
    lane = tl.arange(0, HEIGHT)
    # The last tile of an odd number of unit rows reads its only unit twice; what it makes of the second is not stored.
    unit_row = tl.minimum(tile * WIDE + lane // UNIT_ROWS, (N + UNIT_ROWS - 1) // UNIT_ROWS - 1)
    at = unit_row.to(tl.int64)[:, None] * (STEPS * UNIT) + (lane % UNIT_ROWS)[:, None] * UNIT_COLUMNS
    unit_at = weight + at + ((inner // UNIT_COLUMNS) * UNIT + inner % UNIT_COLUMNS)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        for early in tl.static_range(EARLY):
            for wide in tl.static_range(WIDE):
                ahead = (
                    tl.minimum(tile * WIDE + wide, (N + UNIT_ROWS - 1) // UNIT_ROWS - 1).to(tl.int64) * STEPS
                )
                ahead += tl.minimum(first * DEEP + early, last * DEEP - 1)
                prefetch_unit(weight + ahead * UNIT, UNIT * (weight.dtype.element_ty.primitive_bitwidth // 8))
        gdc_wait()
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_at = x + row.to(tl.int64)[:, None] * K + inner[None, :]
    live = (row < rows)[:, None]
    acc = tl.zeros((HEIGHT, BLOCK_M) if SWAP else (BLOCK_M, HEIGHT), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        unit = tl.load(unit_at + step * (DEEP * UNIT)).to(x.dtype.element_ty)
        mask = live if K % (2 * UNIT_COLUMNS) == 0 else live & (step * LENGTH + inner < K)[None, :]
        taken = tl.load(rows_at + step * LENGTH, mask=mask, other=0.0)
        acc = tl.dot(unit, tl.trans(taken), acc) if SWAP else tl.dot(taken, tl.trans(unit), acc)
    if SWAP:
        acc = tl.trans(acc)
    if SLICES == 1:
        store_tile(acc, out, scale, tile * HEIGHT, row, rows, N, PAIRS, SCALED)
    else:
        join_slices(
            acc, out, scale, parts, arrivals, tile, slice_, block, row, rows,
            N, TILES, SLICES, PAIRS, SCALED,
        )  # fmt: skip
