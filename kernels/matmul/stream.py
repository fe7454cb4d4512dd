"""The decode product: every program streams one run of weight units through a tile of rows.

Units are numbered column tile by column tile, K ascending, and cut into runs, a function of (N, K) alone. A column tile that
several runs share is finished by whichever program arrives last, or by who reads the product: the parts are added in ascending
order, so the bits do not tell who that was. Rows per tile, units per step and which operand is turned change nothing either
(each output is one ascending chain of K on the tensor cores; `kernels.gate` compares them), so they follow speed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.activation.device import silu_of


@triton.jit
def widened(unit, dtype: tl.constexpr, FAST: tl.constexpr):
    """A weight tile in the dtype of x.

    Float8 takes five instructions a pair: the bits move to where bfloat16 has them, which is 2^-120 of the value, and an
    exact product puts the exponent right. e4m3's NaN would not survive, but `pack` never makes one.
    """
    if unit.dtype == dtype:
        return unit
    if not FAST:
        return unit.to(dtype)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, raw;
        cvt.u32.u16 raw, $1;
        prmt.b32 a, 0, raw, 0x5040;
        shr.b32 b, a, 4;
        and.b32 a, a, 0x80008000;
        and.b32 b, b, 0x07f007f0;
        or.b32 a, a, b;
        mov.b32 b, 0x7b807b80;
        mul.bf16x2 $0, a, b;
        }""",
        "=r,h",
        [unit],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def store_tile(acc, out, scale, first, row, rows, N: tl.constexpr, PAIRS: tl.constexpr, SCALED: tl.constexpr):
    """Finish a float32 tile [rows, columns from `first` on]: channel scales, the pair's activation, one rounding."""
    WIDTH: tl.constexpr = acc.shape[1]
    column = first + tl.arange(0, WIDTH)
    if SCALED:
        acc *= tl.load(scale + column, mask=column < N, other=0.0)[None, :]
    if PAIRS:
        gate, up = tl.split(tl.reshape(acc, (acc.shape[0], WIDTH // 2, 2)))
        acc = silu_of(gate) * up
        column = first // 2 + tl.arange(0, WIDTH // 2)
    OUT: tl.constexpr = N // 2 if PAIRS else N
    at = row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < OUT)[None, :])


@triton.jit
def store_part(acc, out, slice_, height, first, row, rows, N: tl.constexpr):
    """A float32 tile of one slice of K, into out [slices, height, N]: whoever reads the sum adds the slices."""
    column = first + tl.arange(0, acc.shape[1])
    at = (slice_.to(tl.int64) * height + row)[:, None] * N + column[None, :]
    tl.store(out + at, acc, mask=(row < rows)[:, None] & (column < N)[None, :])


@triton.jit
def finish_tile(
    acc, out, scale, parts, arrivals, tile, run, block, row, rows,
    N: tl.constexpr, STEPS: tl.constexpr, SLICES: tl.constexpr, EACH: tl.constexpr, TILES: tl.constexpr,
    RUNS: tl.constexpr, PAIRS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Store the tile if this run has all of its K; else leave a part, and the last to arrive adds them in order.

    A run shares at most two tiles: the one it starts in and the one it ends in. Its part of a tile that began before it
    lies in slot 2 * run, of one that begins with it in slot 2 * run + 1.
    """
    ROWS: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    head = tile * SLICES if SLICES else tile * STEPS // EACH
    tail = head + SLICES - 1 if SLICES else (tile * STEPS + STEPS - 1) // EACH
    if head == tail:
        store_tile(acc, out, scale, tile * WIDTH, row, rows, N, PAIRS, SCALED)
    else:
        live = (row < rows)[:, None]
        within = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        parts += block.to(tl.int64) * (2 * RUNS * ROWS * WIDTH)
        tl.store(parts + (2 * run + (run == head)) * (ROWS * WIDTH) + within, acc, mask=live)
        tl.debug_barrier()
        arrivals += block * TILES + tile
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == tail - head:
            # Past the L1, which may hold the lines of an earlier product.
            total = tl.load(
                parts + (2 * head + 1) * (ROWS * WIDTH) + within, mask=live, other=0.0, cache_modifier=".cg"
            )
            for other in tl.range(head + 1, tail + 1, num_stages=1):
                part = parts + 2 * other * (ROWS * WIDTH) + within
                total += tl.load(part, mask=live, other=0.0, cache_modifier=".cg")
            store_tile(total, out, scale, tile * WIDTH, row, rows, N, PAIRS, SCALED)
            tl.store(arrivals, 0)


@triton.jit(do_not_specialize=["rows", "height"])
def stream_kernel(
    x, weight, out, scale, parts, arrivals, rows, height,
    N: tl.constexpr, K: tl.constexpr, UNIT_ROWS: tl.constexpr, UNIT_COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    TILES: tl.constexpr, SLICES: tl.constexpr, EACH: tl.constexpr, RUNS: tl.constexpr,
    BLOCK_M: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr,
    PAIRS: tl.constexpr, SCALED: tl.constexpr, SUMMED: tl.constexpr, LATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[rows, N] = x[rows, K] @ weight.T for one row block and one run of units. Grid (row blocks, RUNS).

    Not SUMMED: out is float32 [SLICES, height, N], each slice's products. LATE: the next launch may start when a program
    has read its weights, not when it starts.

    weight [TILES, STEPS, UNIT_ROWS, UNIT_COLUMNS], zero-padded to even STEPS; a run is one of the SLICES of a tile or
    EACH units. parts float32 [row blocks, 2 * RUNS, tile]; arrivals int32 [row blocks, TILES], zero before and after.
    A step takes DEEP units along K. SWAP: the weight is the instruction's left operand, so that a tile may have 16 rows
    of x.
    """
    UNIT: tl.constexpr = UNIT_ROWS * UNIT_COLUMNS
    LENGTH: tl.constexpr = DEEP * UNIT_COLUMNS
    block, run = tl.program_id(0), tl.program_id(1)
    if SLICES:
        begin, slice_ = run // SLICES * STEPS, run % SLICES
        first = begin + slice_ * (STEPS // 2) // SLICES * 2
        last = begin + (slice_ + 1) * (STEPS // 2) // SLICES * 2
    else:
        first = run * EACH
        last = tl.minimum(first + EACH, TILES * STEPS)
    inner = tl.arange(0, LENGTH)
    lane = tl.arange(0, UNIT_ROWS)[:, None] * UNIT_COLUMNS
    unit_at = weight + (lane + ((inner // UNIT_COLUMNS) * UNIT + inner % UNIT_COLUMNS)[None, :])
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_at = x + row.to(tl.int64)[:, None] * K + inner[None, :]
    live = (row < rows)[:, None]
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
    first_tile, last_tile = first // STEPS, (last - 1) // STEPS
    for tile in tl.range(first_tile, last_tile + 1, num_stages=1):
        base = tile * STEPS
        # Not max(first - base, 0): ptxas 12.8 fuses it and loses the sign of base, and the loop below runs no step.
        start = tl.where(tile == first_tile, first - first_tile * STEPS, 0) // DEEP
        stop = tl.where(tile == last_tile, last - last_tile * STEPS, STEPS) // DEEP
        acc = tl.zeros((UNIT_ROWS, BLOCK_M) if SWAP else (BLOCK_M, UNIT_ROWS), tl.float32)
        for step in tl.range(start, stop, num_stages=STAGES):
            unit = tl.load(unit_at + (base + step * DEEP).to(tl.int64) * UNIT)
            unit = widened(unit, x.dtype.element_ty, OVERLAP)
            mask = live if K == STEPS * UNIT_COLUMNS else live & (step * LENGTH + inner < K)[None, :]
            taken = tl.load(rows_at + step * LENGTH, mask=mask, other=0.0)
            acc = tl.dot(unit, tl.trans(taken), acc) if SWAP else tl.dot(taken, tl.trans(unit), acc)
        if OVERLAP and LATE and tile == last_tile:
            gdc_launch_dependents()
        done = tl.trans(acc) if SWAP else acc
        if SUMMED:
            finish_tile(
                done, out, scale, parts, arrivals, tile, run, block, row, rows,
                N, STEPS, SLICES, EACH, TILES, RUNS, PAIRS, SCALED,
            )  # fmt: skip
        else:
            store_part(done, out, run % SLICES, height, tile * UNIT_ROWS, row, rows, N)
