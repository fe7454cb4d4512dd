"""The decode product: every program streams one contiguous run of weight units through the same 64-row tile.

A column tile that several programs share is finished by whichever of them arrives last: it adds the stored float32 parts
in ascending K order, so the bits do not tell who that was.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up in float32; exp overflows to inf below -88, which gives the right 0."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def store_tile(acc, out, scale, tile, row, rows, N: tl.constexpr, PAIRS: tl.constexpr, SCALED: tl.constexpr):
    """Finish one [BLOCK_M, BLOCK_N] float32 tile: channel scales, the pair's activation, one rounding."""
    BLOCK_N: tl.constexpr = acc.shape[1]
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if SCALED:
        acc *= tl.load(scale + column)[None, :]
    if PAIRS:
        gate, up = tl.split(tl.reshape(acc, (acc.shape[0], BLOCK_N // 2, 2)))
        acc = silu_times(gate, up)
        column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    WIDTH: tl.constexpr = N // 2 if PAIRS else N
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def finish_tile(
    acc, out, scale, parts, arrivals, tile, program, block, rows,
    N: tl.constexpr, STEPS: tl.constexpr, EACH: tl.constexpr, TILES: tl.constexpr, PROGRAMS: tl.constexpr,
    PAIRS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Store the tile if this program has all of its K; else leave a part, and the last to arrive adds them all.

    A program has at most two tiles that it shares: the one it starts in and the one it ends in. Its part of a tile that
    began before it lies in slot 2p, of one that begins with it in slot 2p + 1.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    lane = tl.arange(0, BLOCK_M)
    row = block * BLOCK_M + lane
    head, tail = tile * STEPS // EACH, (tile * STEPS + STEPS - 1) // EACH
    if head == tail:
        store_tile(acc, out, scale, tile, row, rows, N, PAIRS, SCALED)
    else:
        within = lane[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mask = (row < rows)[:, None]
        parts += block * (2 * PROGRAMS * BLOCK_M * BLOCK_N)
        slot = 2 * program + (program == head)
        tl.store(parts + slot * (BLOCK_M * BLOCK_N) + within, acc, mask=mask)
        tl.debug_barrier()
        arrivals += block * TILES + tile
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == tail - head:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for other in tl.range(head, tail + 1, num_stages=1):
                slot = 2 * other + (other == head)
                # Past the L1, which may hold the lines of an earlier product.
                total += tl.load(
                    parts + slot * (BLOCK_M * BLOCK_N) + within, mask=mask, other=0.0, cache_modifier=".cg"
                )
            store_tile(total, out, scale, tile, row, rows, N, PAIRS, SCALED)
            tl.store(arrivals, 0)


@triton.jit(do_not_specialize=["rows"])
def stream_kernel(
    x, weight, out, scale, parts, arrivals, rows,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EACH: tl.constexpr, TILES: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[rows, N] = x[rows, K] @ weight.T for one row block and one run of units.

    weight [TILES, STEPS, BLOCK_N, BLOCK_K], zero-padded; parts float32 [row blocks, 2 * PROGRAMS, BLOCK_M, BLOCK_N];
    arrivals int32 [row blocks, TILES], zero before and after. Grid (row blocks, PROGRAMS).
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    UNIT: tl.constexpr = BLOCK_N * BLOCK_K
    block, program = tl.program_id(0), tl.program_id(1)
    first = program * EACH
    last = tl.minimum(first + EACH, TILES * STEPS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    rows_at = x + row.to(tl.int64)[:, None] * K + inner[None, :]
    unit_at = weight + tl.arange(0, BLOCK_N)[None, :] * BLOCK_K + inner[:, None]
    live = (row < rows)[:, None]
    for tile in tl.range(first // STEPS, (last - 1) // STEPS + 1, num_stages=1):
        base = tile * STEPS
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(tl.maximum(first - base, 0), tl.minimum(last - base, STEPS), num_stages=STAGES):
            unit = tl.load(unit_at + (base + step).to(tl.int64) * UNIT)
            mask = live if K % BLOCK_K == 0 else live & (step * BLOCK_K + inner < K)[None, :]
            taken = tl.load(rows_at + step * BLOCK_K, mask=mask, other=0.0)
            acc = tl.dot(taken, unit.to(taken.dtype), acc)
        finish_tile(
            acc, out, scale, parts, arrivals, tile, program, block, rows,
            N, STEPS, EACH, TILES, PROGRAMS, PAIRS, SCALED,
        )  # fmt: skip
