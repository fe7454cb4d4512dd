"""Row-exact products on the card: weights in 16 KiB units, cut into fixed runs.

Decode and verify rows run through `stream_kernel`, prefill rows through `dense_kernel`; which of the two is the caller's
word. The row count picks a tile, never the order in which a row's products are added.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import PDL
from kernels.matmul.dense import dense_kernel
from kernels.matmul.packed import Packed, Recipe
from kernels.matmul.stream import stream_kernel
from kernels.matmul.tiles import Cut, RowTile, cut, programs_of, row_tile
from kernels.tiles import RUNS, UNIT_COLUMNS, UNIT_ROWS

MOST_ROWS: Final = 256
"""Decode rows of one launch; more take several, so that the parts have a fixed room."""

PREFILL_ROWS: Final = 128
"""Rows of a prefill tile."""

_PADDED_ROWS: Final = 64
_FLOAT8: Final = torch.float8_e4m3fn
_MOST_ARRIVALS: Final = 65_536
_MOST_RUNS: Final = 3 * RUNS


def pack(weight: Tensor, recipe: Recipe, *, pairs: bool = False) -> Packed:
    """Lay out a bfloat16 (or, in tests, float32) weight [N, K] for a recipe of the card.

    `card`: [N / 128, K / 64, 128, 64], zero-padded, so that a unit is 16 KiB in a row. With `pairs` gate and up rows
    alternate. `card-fp8`: the same in e4m3, each output channel scaled to its largest magnitude.
    """
    n, k = weight.shape
    if recipe in ("padded", "free"):
        return Packed(weight.contiguous(), recipe, n, k, pairs)
    if recipe not in ("card", "card-fp8"):
        raise ValueError(f"recipe {recipe!r} is none of the card's")
    if pairs:
        weight = torch.stack(weight.chunk(2), dim=1).reshape(n, k)
    scale = None
    if recipe == "card-fp8":
        largest = weight.abs().amax(dim=1).float()
        scale = torch.where(largest > 0, largest / torch.finfo(_FLOAT8).max, 1.0)
        weight = (weight.float() / scale[:, None]).to(_FLOAT8)
        scale = F.pad(scale, (0, -n % UNIT_ROWS), value=1.0)
    return Packed(_units(weight), recipe, n, k, pairs, scale)


def _units(weight: Tensor) -> Tensor:
    """[N, K] -> [N / UNIT_ROWS, K / UNIT_COLUMNS, UNIT_ROWS, UNIT_COLUMNS], padded with zeros."""
    n, k = weight.shape
    at = cut(n, k)
    height, length = at.tiles * UNIT_ROWS, at.steps * UNIT_COLUMNS
    if (n, k) != (height, length):
        whole = weight.new_zeros(height, length)
        whole[:n, :k] = weight
        weight = whole
    return weight.view(at.tiles, UNIT_ROWS, at.steps, UNIT_COLUMNS).transpose(1, 2).contiguous()


def linear(
    x: Tensor, packed: Packed, *, prefill: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """[M, K] -> [M, N] in `out_dtype` (x's own by default), accumulated in float32 and rounded once."""
    if packed.pairs and packed.recipe not in ("padded", "free"):
        raise ValueError("a weight packed as pairs is for linear_swiglu")
    if packed.recipe in ("padded", "free"):
        return _cublas(x, packed).to(out_dtype or x.dtype)
    return _product(x, packed, prefill, out_dtype or x.dtype)


def linear_parts(x: Tensor, packed: Packed, *, prefill: bool = False) -> Tensor:
    """[M, K] -> `linear`'s [M, N], or float32 [slices, M, N] whose sum in order, rounded to x's type, it is.

    Decode products of a weight whose column tiles are sliced leave their sum to who reads it: the last program of a tile
    need not wait for parts that have just been written, 0.2 ms in a step of 64 sequences (kernels/NOTES.md).
    """
    if prefill or packed.recipe != "card" or packed.pairs:
        return linear(x, packed, prefill=prefill)
    at = cut(packed.out_features, packed.in_features)
    if at.slices < 2:
        return linear(x, packed)
    out = torch.empty(at.slices, x.shape[0], packed.out_features, dtype=torch.float32, device=x.device)
    x = _aligned(x)
    for first in range(0, x.shape[0], MOST_ROWS):
        some = x[first : first + MOST_ROWS]
        stream_product(some, packed, out[:, first : first + MOST_ROWS], row_tile(some.shape[0], at), at)
    return out


def linear_swiglu(x: Tensor, packed: Packed, *, prefill: bool = False) -> Tensor:
    """[M, K] -> silu(gate) * up, [M, N / 2]; gate and up stay in float32 until the result is rounded."""
    if packed.recipe in ("padded", "free"):
        from kernels.activation.device import swiglu

        return swiglu(_cublas(x, packed))
    if not packed.pairs:
        raise ValueError("linear_swiglu takes a weight packed as pairs")
    return _product(x, packed, prefill, x.dtype)


def _product(x: Tensor, packed: Packed, prefill: bool, out_dtype: torch.dtype) -> Tensor:
    width = packed.out_features // 2 if packed.pairs else packed.out_features
    out = torch.empty(x.shape[0], width, dtype=out_dtype, device=x.device)
    x = _aligned(x)
    if prefill:
        _dense(x, packed, out)
    else:
        n, k = packed.out_features, packed.in_features
        programs = programs_of(n, k, float8=packed.scale is not None)
        at = cut(n, k, programs=programs)
        for first in range(0, x.shape[0], MOST_ROWS):
            some = x[first : first + MOST_ROWS]
            tile = row_tile(some.shape[0], at, programs=programs)
            stream_product(some, packed, out[first : first + MOST_ROWS], tile, at)
    return out


def _aligned(x: Tensor) -> Tensor:
    """Rows in one piece, where loads of 16 bytes may start."""
    x = x.contiguous()
    if x.data_ptr() % 16:
        raise ValueError("rows must start at a multiple of 16 bytes")
    return x


def stream_product(x: Tensor, packed: Packed, out: Tensor, tile: RowTile, at: Cut) -> None:
    """The decode product of x [M, K] contiguous into out, through a row tile and the cut of the weight's shape.

    out [M, N] contiguous, or float32 [slices, M, N] for the parts of a sliced weight: a view of some rows of each slice.
    """
    blocks = -(-x.shape[0] // tile.rows)
    if at.runs > _MOST_RUNS or blocks * tile.rows > MOST_ROWS or blocks * at.tiles > _MOST_ARRIVALS:
        raise ValueError(f"{blocks} row blocks of {at} are more than the workspace holds")
    in_parts = out.dim() == 3
    parts, arrivals = _workspace(x.device, -(-at.runs // RUNS))
    stream_kernel[(blocks, at.runs)](
        x,
        packed.weight,
        out,
        packed.scale,
        parts,
        arrivals,
        x.shape[0],
        out.stride(0) // packed.out_features if in_parts else 0,
        N=packed.out_features,
        K=packed.in_features,
        UNIT_ROWS=UNIT_ROWS,
        UNIT_COLUMNS=UNIT_COLUMNS,
        STEPS=at.steps,
        TILES=at.tiles,
        SLICES=at.slices,
        EACH=at.each,
        RUNS=at.runs,
        BLOCK_M=tile.rows,
        DEEP=tile.deep,
        STAGES=tile.stages,
        SWAP=tile.swap,
        PAIRS=packed.pairs,
        SCALED=packed.scale is not None,
        SUMMED=not in_parts,
        LATE=tile.late,
        num_warps=tile.warps,
        **PDL,
    )


def _dense(x: Tensor, packed: Packed, out: Tensor) -> None:
    rows, (unit_rows, steps) = x.shape[0], packed.weight.shape[:2]
    # A wide tile reads x less often; a few rows want more programs.
    wide = 2 if rows > PREFILL_ROWS else 1
    tiles = -(-unit_rows // wide)
    units = packed.weight.view(-1, UNIT_COLUMNS)
    dense_kernel[(-(-rows // PREFILL_ROWS) * tiles,)](
        TensorDescriptor.from_tensor(x, [PREFILL_ROWS, UNIT_COLUMNS]),
        TensorDescriptor.from_tensor(units, [UNIT_ROWS, UNIT_COLUMNS]),
        out,
        packed.scale,
        rows,
        N=packed.out_features,
        UNIT_ROWS=UNIT_ROWS,
        UNIT_COLUMNS=UNIT_COLUMNS,
        STEPS=steps,
        TILES=tiles,
        BLOCK_M=PREFILL_ROWS,
        WIDE=wide,
        GROUP=16,
        STAGES=4,
        PAIRS=packed.pairs,
        SCALED=packed.scale is not None,
        num_warps=8,
    )


@lru_cache(maxsize=16)
def _workspace(device: torch.device, programs: int) -> tuple[Tensor, Tensor]:
    """Parts and arrival counters for so many programs a multiprocessor: launches of one stream use it one by one.

    Allocated once and kept, so that a CUDA graph may hold its address; the first product must come before a capture.
    """
    room = 2 * RUNS * programs * MOST_ROWS * UNIT_ROWS
    parts = torch.empty(room, dtype=torch.float32, device=device)
    return parts, torch.zeros(_MOST_ARRIVALS, dtype=torch.int32, device=device)


def _cublas(x: Tensor, packed: Packed) -> Tensor:
    """The library's product: on whole tiles of 64 rows (`padded`), or on the rows as they come (`free`)."""
    if packed.recipe == "free":
        return F.linear(x, packed.weight)
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % _PADDED_ROWS))
    tiles = [F.linear(tile, packed.weight) for tile in padded.split(_PADDED_ROWS)]
    return torch.cat(tiles)[: x.shape[0]]
