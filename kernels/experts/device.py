"""The mixture in Triton: route, sort the (row, rank) pairs by (expert, row) (`grouping`), two grouped products, the sum.

    _route   one program a row: softmax over all experts, the k largest one after another
    _up      tiles of one expert's pairs: silu(gate) * up, rounded once
    _down    the same tiles back to H, float32, each pair to a row of its own
    _sum     a row's k parts in rank order, and the shared expert behind them

Tiles are constants of the phase. The grid is the most tiles that so many pairs can fill, so that a CUDA graph can replay
the launch whatever the router says; programs past the last tile exit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.activation.device import silu_of
from kernels.experts.packed import PackedExperts, Routes
from kernels.grouping import group, items_of, most_tiles
from kernels.launch import PDL
from kernels.matmul.packed import Recipe


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a product's tile: rows, outputs, inputs of a step, and how the compiler lays it out."""

    m: int
    n: int
    k: int
    stages: int
    warps: int


UP: Final = {False: Tile(16, 64, 128, 4, 4), True: Tile(64, 256, 64, 4, 8)}
DOWN: Final = {False: Tile(16, 64, 128, 4, 4), True: Tile(64, 128, 64, 4, 8)}
"""By phase (prefill or not); the two share the row count, since one list of tiles serves both products."""


@triton.jit
def _route(
    logits, ids, weights, stride,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr, RENORMALISE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row: ids int32 and weights float32 [row, K], the largest first. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at, rank = tl.arange(0, BLOCK), tl.arange(0, RANKS)
    x = tl.load(logits + row * stride + at, mask=at < EXPERTS, other=-float("inf"))
    top = tl.max(x, axis=0)
    raised = tl.exp(x - top)
    chosen = tl.zeros([RANKS], tl.int32)
    weight = tl.zeros([RANKS], tl.float32)
    left = x
    for number in tl.static_range(K):
        best = tl.max(left, axis=0)
        # A NaN finds the last expert, and stays NaN.
        found = tl.min(tl.where(left == best, at, EXPERTS - 1), axis=0)
        chosen = tl.where(rank == number, found, chosen)
        weight = tl.where(rank == number, tl.exp(best - top), weight)
        left = tl.where(at == found, -float("inf"), left)
    weight = weight / tl.sum(raised, axis=0)
    if RENORMALISE:
        weight = weight / tl.sum(weight, axis=0)
    tl.store(ids + row * K + rank, chosen, mask=rank < K)
    tl.store(weights + row * K + rank, weight, mask=rank < K)


@triton.jit
def _product(rows_at, live, weight, expert, block, WIDTH: tl.constexpr, INNER: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """[BLOCK_M, INNER] rows at pointers `rows_at` [BLOCK_M, 1] times one expert's weight tile, K ascending, float32."""
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weight_at = weight + (expert.to(tl.int64) * WIDTH + column)[None, :] * INNER
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        inside = step + inner < INNER
        taken = tl.load(rows_at + (step + inner)[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        unit = tl.load(
            weight_at + (step + inner)[:, None], mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0
        )
        acc = tl.dot(taken, unit, acc)
    return acc


@triton.jit
def _up(
    x, weight, out, order, tile_expert, tile_start, tile_end, tile_count,
    K: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of 2I interleaved gate and up rows, tiles): out [place, I]."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if tile >= tl.load(tile_count):
        return
    place, live, pair = items_of(order, tile_start, tile_end, tile, BLOCK_M)
    rows_at = x + ((pair // K).to(tl.int64) * INNER)[:, None]
    expert = tl.load(tile_expert + tile)
    acc = _product(rows_at, live, weight, expert, block, WIDTH, INNER, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
    column = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    at = (place.to(tl.int64) * (WIDTH // 2))[:, None] + column[None, :]
    mask = live[:, None] & (column < WIDTH // 2)[None, :]
    tl.store(out + at, (silu_of(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _down(
    h, weight, parts, order, tile_expert, tile_start, tile_end, tile_count,
    WIDTH: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of H, tiles): parts float32 [pair, H]."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if tile >= tl.load(tile_count):
        return
    place, live, pair = items_of(order, tile_start, tile_end, tile, BLOCK_M)
    rows_at = h + (place.to(tl.int64) * INNER)[:, None]
    expert = tl.load(tile_expert + tile)
    acc = _product(rows_at, live, weight, expert, block, WIDTH, INNER, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = (pair.to(tl.int64) * WIDTH)[:, None] + column[None, :]
    tl.store(parts + at, acc, mask=live[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _sum(
    parts, weights, shared, gate, out,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of H, rows)."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = row * K * WIDTH + column
    total = tl.load(weights + row * K) * tl.load(parts + at, mask=mask, other=0.0)
    for rank in tl.static_range(1, K):
        part = tl.load(parts + at + rank * WIDTH, mask=mask, other=0.0)
        total += tl.load(weights + row * K + rank) * part
    if SHARED:
        more = tl.load(shared + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            more = more / (1.0 + tl.exp(-tl.load(gate + row).to(tl.float32)))
        total += more
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=mask)


def pack(gate_up: Tensor, down: Tensor, recipe: Recipe) -> PackedExperts:
    """As the twin, recipe `card`: gate and up rows alternate, so that a tile holds both of its outputs."""
    if recipe != "card":
        raise ValueError(f"experts have no recipe {recipe!r} on a card")
    count, hidden, width = down.shape
    pairs = torch.stack(gate_up.chunk(2, dim=1), dim=2).reshape(count, 2 * width, hidden)
    return PackedExperts(recipe, count, hidden, width, gate_up=pairs, down=down.contiguous())


def route(logits: Tensor, k: int, *, renormalise: bool = True) -> Routes:
    """As the twin; rows may be strided."""
    rows, experts = logits.shape
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    _route[(rows,)](
        logits, ids, weights, logits.stride(0), EXPERTS=experts, BLOCK=triton.next_power_of_2(experts), K=k,
        RANKS=triton.next_power_of_2(k), RENORMALISE=renormalise, num_warps=1, **PDL,
    )  # fmt: skip
    return Routes(ids, weights)


def experts(
    x: Tensor,
    routes: Routes,
    packed: PackedExperts,
    *,
    prefill: bool = False,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """As the twin; x [M, H] contiguous."""
    if packed.gate_up is None or packed.down is None:
        raise ValueError("experts packed for the CPU")
    (rows, k), hidden, width = routes.ids.shape, packed.hidden, packed.width
    pairs, up, down = rows * k, UP[prefill], DOWN[prefill]
    most = most_tiles(pairs, packed.experts, up.m)
    order, *tiles = group(routes.ids, packed.experts, up.m)
    inner = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    _up[(triton.cdiv(2 * width, up.n), most)](
        x, packed.gate_up, inner, order, *tiles, K=k, WIDTH=2 * width, INNER=hidden, **_tile(up)
    )
    parts = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    _down[(triton.cdiv(hidden, down.n), most)](
        inner, packed.down, parts, order, *tiles, WIDTH=hidden, INNER=width, **_tile(down)
    )
    out = torch.empty_like(x)
    block = min(1024, triton.next_power_of_2(hidden))
    _sum[(triton.cdiv(hidden, block), rows)](
        parts, routes.weights, x if shared is None else shared, x if shared_gate is None else shared_gate, out,
        K=k, WIDTH=hidden, BLOCK=block, SHARED=shared is not None, GATED=shared_gate is not None, num_warps=4,
        **PDL,
    )  # fmt: skip
    return out


def _tile(tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "STAGES": tile.stages, "num_warps": tile.warps,
        **PDL,
    }  # fmt: skip
