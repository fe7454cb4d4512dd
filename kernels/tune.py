"""Times the row tiles of the decode product on a card: `python -m kernels.tune [--rows 1 16 64] [--json FILE]`.

A tile counts only if every output of every timed launch has the bits of the tile in use: a time of a launch that skipped
work would be a fine one. Weights rotate, so that the L2 does not serve them; launches are timed inside a CUDA graph, as
the engine runs them. The floor is the weight's bytes at the copy bandwidth of an H200 (`kernels/NOTES.md`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kernels.matmul import device
from kernels.matmul.packed import Packed
from kernels.matmul.tiles import RowTile, cut, row_tile

BANDWIDTH: Final = 4.28e12
"""Bytes a second of a device copy, read and written, on an H200."""

SHAPES: Final = {
    "gate_up": (34816, 5120),
    "down": (5120, 17408),
    "mix": (16480, 5120),
    "qkv": (14336, 5120),
    "out": (5120, 6144),
    "head": (248320, 5120),
}
"""(N, K) of the 27B hybrid."""

CANDIDATES: Final = (
    RowTile(16, 1, 5, 4, True),
    RowTile(16, 1, 8, 4, True),
    RowTile(16, 2, 4, 4, True),
    RowTile(32, 2, 4, 4, True),
    RowTile(64, 2, 4, 8, False),
    RowTile(64, 2, 4, 8, False, late=True),
    RowTile(64, 2, 3, 4, False),
    RowTile(64, 2, 3, 4, False, late=True),
    RowTile(128, 1, 6, 8, False),
    RowTile(128, 1, 6, 8, False, late=True),
    RowTile(128, 2, 3, 8, True),
)
"""Those in use among them. What `late` is worth shows between other launches, in a whole step (`burstline bench decode`)."""

_COLD_BYTES: Final = 1_200_000_000
"""Weights in rotation at least: twenty times the L2."""

Timer = Callable[[Sequence[Callable[[], object]]], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One tile on one weight."""

    shape: str
    rows: int
    tile: RowTile
    microseconds: float
    over_floor: float
    same_bits: bool


def graph_microseconds(calls: Sequence[Callable[[], object]], repeats: int = 8) -> float:
    """Median time of one call over replays of a graph that holds them all."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be writing the inputs
    times = []
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def weights(n: int, k: int, place: str, cold_bytes: int = _COLD_BYTES) -> list[Packed]:
    """Random bfloat16 weights (float32 on the CPU), two at least and enough of them to pass the L2 by."""
    dtype = torch.bfloat16 if place == "cuda" else torch.float32
    count = max(2, -(-cold_bytes // (2 * n * k)))
    made = []
    for seed in range(count):
        generator = torch.Generator(place).manual_seed(seed)
        weight = torch.randn(n, k, generator=generator, device=place, dtype=dtype).mul_(0.02)
        made.append(device.pack(weight, "card"))
    return made


def measure(
    shape: str, packed: Sequence[Packed], rows: int, tiles: Iterable[RowTile], timer: Timer
) -> list[Figure]:
    """Figures of the tiles that hold `rows`, against the bits of the tile in use."""
    n, k = packed[0].out_features, packed[0].in_features
    like = packed[0].weight
    x = torch.randn(rows, k, generator=torch.Generator(like.device).manual_seed(rows), device=like.device).to(
        like.dtype
    )
    expected = _launch_all(x, packed, row_tile(rows, cut(n, k)))
    floor = 1e6 * n * k * like.element_size() / BANDWIDTH
    figures = []
    for tile in tiles:
        outputs = [torch.full_like(out, torch.nan) for out in expected]
        calls = [_call(x, weight, out, tile) for weight, out in zip(packed, outputs, strict=True)]
        time = timer(calls)
        same = all(torch.equal(got, wanted) for got, wanted in zip(outputs, expected, strict=True))
        figures.append(
            Figure(
                shape=shape,
                rows=rows,
                tile=tile,
                microseconds=round(time, 2),
                over_floor=round(time / floor, 3),
                same_bits=same,
            )
        )
    return figures


def _launch_all(x: Tensor, packed: Sequence[Packed], tile: RowTile) -> list[Tensor]:
    outputs = [
        torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device) for weight in packed
    ]
    for weight, out in zip(packed, outputs, strict=True):
        _call(x, weight, out, tile)()
    return outputs


def _call(x: Tensor, weight: Packed, out: Tensor, tile: RowTile) -> Callable[[], None]:
    at = cut(weight.out_features, weight.in_features)
    return lambda: device.stream_product(x, weight, out, tile, at)


def main() -> int:
    """Print a table, the fastest first; 1 if a tile gave other bits."""
    parser = argparse.ArgumentParser(description="Times the row tiles of the decode product on a card.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    every: list[Figure] = []
    for shape, (n, k) in SHAPES.items():
        packed = weights(n, k, "cuda")
        for rows in arguments.rows:
            tiles = [tile for tile in CANDIDATES if rows <= tile.rows <= 4 * max(rows, 16)]
            figures = sorted(
                measure(shape, packed, rows, tiles, graph_microseconds), key=lambda f: f.microseconds
            )
            every += figures
            for figure in figures:
                bits = "same bits" if figure.same_bits else "OTHER BITS"
                sys.stdout.write(
                    f"{shape:8} {rows:4} rows {figure.microseconds:8.2f} us {figure.over_floor:6.3f} x floor"
                    f"  {bits}  {figure.tile}\n"
                )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in every], indent=1) + "\n")
    return int(not all(figure.same_bits for figure in every))


if __name__ == "__main__":
    sys.exit(main())
