"""Paged attention: values against a dense softmax, bits against every way to launch the same rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import paged_attention
from kernels.paged_attention import AttentionPlan, QueryTile
from kernels.testing import CO_TENANTS, COLUMNS, assert_equal_bits, poison, threads
from kernels.tiles import DECODE_COLUMNS, ROWS

HEADS, KV_HEADS, WIDTH, BLOCKS = 4, 2, 32, 64


class Sequence:
    """Keys, values and queries of one sequence, and its blocks in a poisoned pool."""

    def __init__(self, seed: int, length: int, blocks: list[int]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.query = torch.randn(length, HEADS, WIDTH, generator=generator)
        self.keys = torch.randn(length, KV_HEADS, WIDTH, generator=generator)
        self.values = torch.randn(length, KV_HEADS, WIDTH, generator=generator)
        self.blocks = blocks

    def write(self, pools: tuple[Tensor, Tensor], first: int, last: int) -> None:
        positions = torch.arange(first, last)
        base = torch.tensor(self.blocks)[positions // ROWS] * KV_HEADS * ROWS + positions % ROWS
        targets = (base[:, None] + torch.arange(KV_HEADS) * ROWS).flatten()
        for pool, rows in zip(pools, (self.keys, self.values), strict=True):
            paged_attention.write_rows(pool, rows[first:last], targets)


def _pools() -> tuple[Tensor, Tensor]:
    pools = torch.empty(BLOCKS, KV_HEADS, ROWS, WIDTH), torch.empty(BLOCKS, KV_HEADS, ROWS, WIDTH)
    poison(*pools)
    return pools


def _launch(
    parts: list[tuple[Sequence, int, int]], tile_rows: int, pools: tuple[Tensor, Tensor], window: int = 0
) -> list[Tensor]:
    """One call over tiles that start at `first` with `count` columns each."""
    tiles = [
        QueryTile(first, count, first + count - 1, sequence.blocks, window)
        for sequence, first, count in parts
    ]
    query = torch.zeros(len(parts), tile_rows, HEADS, WIDTH)
    for number, (sequence, first, count) in enumerate(parts):
        query[number, :count] = sequence.query[first : first + count]
    plan = AttentionPlan.build(tiles, tile_rows, KV_HEADS)
    out = paged_attention.attend(query.view(-1, HEADS, WIDTH), *pools, plan).view(
        len(parts), tile_rows, HEADS, WIDTH
    )
    return [out[number, :count] for number, (_, _, count) in enumerate(parts)]


def _dense(sequence: Sequence, last: int, window: int = 0) -> Tensor:
    """Row `last` the long way, float64."""
    seen = slice(max(0, last + 1 - window) if window else 0, last + 1)
    keys = sequence.keys[seen].double().repeat_interleave(HEADS // KV_HEADS, 1)
    values = sequence.values[seen].double().repeat_interleave(HEADS // KV_HEADS, 1)
    weights = torch.einsum("hd,khd->hk", sequence.query[last].double(), keys).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, values)


@pytest.mark.parametrize("position", [0, 1, 63, 64, 65, 127, 128, 255, 256, 300])
@pytest.mark.parametrize("tile_rows", [DECODE_COLUMNS, ROWS])
def test_values(position: int, tile_rows: int) -> None:
    sequence, pools = Sequence(1, 301, [9, 3, 40, 7, 22]), _pools()
    sequence.write(pools, 0, position + 1)
    out = _launch([(sequence, position, 1)], tile_rows, pools)[0]
    torch.testing.assert_close(out[0].double(), _dense(sequence, position), rtol=1e-5, atol=1e-5)


def _decode(sequence: Sequence, first: int, last: int) -> Tensor:
    """One column at a time, alone, nothing written beyond it."""
    pools, out = _pools(), []
    sequence.write(pools, 0, first)
    for position in range(first, last):
        sequence.write(pools, position, position + 1)
        out.append(_launch([(sequence, position, 1)], DECODE_COLUMNS, pools)[0])
    return torch.cat(out)


@pytest.mark.parametrize("co_tenants", CO_TENANTS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_verify_bits_equal_decode(columns: int, co_tenants: int) -> None:
    first, last = 250, 250 + 16
    alone = _decode(Sequence(2, 300, [9, 3, 40, 7, 22]), first, last)
    moved = Sequence(2, 300, [50, 2, 51, 1, 60])
    others = [Sequence(10 + i, 40 + 37 * i, list(range(10 + 5 * i, 15 + 5 * i))) for i in range(co_tenants)]
    for count in (1, 2):
        with threads(count):
            pools = _pools()
            for other in others:
                other.write(pools, 0, len(other.query))
            moved.write(pools, 0, first)
            for position in range(first, last, columns):
                end = min(position + columns, last)
                moved.write(pools, position, end)
                parts = [(other, len(other.query) - 1 - i, 1 + i) for i, other in enumerate(others)]
                parts.insert(co_tenants // 2, (moved, position, end - position))
                out = _launch(parts, DECODE_COLUMNS, pools)[co_tenants // 2]
                assert_equal_bits(out, alone[position - first : end - first], f"rows {position}..{end}")


def test_prefill_bits_do_not_depend_on_the_tiles_in_a_call() -> None:
    sequence, pools = Sequence(3, 320, [9, 3, 40, 7, 22]), _pools()
    sequence.write(pools, 0, 320)
    tiles = [(sequence, first, ROWS) for first in range(0, 320, ROWS)]
    together = torch.cat(_launch(tiles, ROWS, pools))
    for count in (1, 2):
        with threads(count):
            one_by_one = torch.cat([_launch([tile], ROWS, pools)[0] for tile in tiles])
            assert_equal_bits(one_by_one, together, f"{count} threads")
    short = _pools()
    sequence.write(short, 0, 300)
    tail = _launch([(sequence, 256, 44)], ROWS, short)[0]
    assert_equal_bits(tail, together[256:300], "a tail that is no whole tile")


def test_another_sequences_nan_stays_its_own() -> None:
    good, bad = Sequence(4, 100, [0, 1]), Sequence(5, 100, [2, 3])
    bad.values[:] = torch.nan
    pools = _pools()
    good.write(pools, 0, 70)
    bad.write(pools, 0, 70)
    alone = _launch([(good, 66, 4)], DECODE_COLUMNS, pools)[0]
    beside = _launch([(bad, 68, 2), (good, 66, 4)], DECODE_COLUMNS, pools)
    assert beside[0].isnan().all()
    assert_equal_bits(beside[1], alone, "beside NaN")


WINDOWS = [1, 5, 63, 64, 65, 100, 128]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tile_rows", [DECODE_COLUMNS, ROWS])
def test_a_windows_row_sees_its_window(tile_rows: int, window: int) -> None:
    """Nothing below any window was ever written, and the blocks there are someone else's: their numbers are wrong."""
    sequence, pools = Sequence(6, 301, [9, 3, 40, 7, 22]), _pools()
    for position in (0, 1, 63, 64, 65, 127, 128, 200, 256, 300):
        first = max(0, position + 1 - window)
        gone = Sequence(6, 301, [BLOCKS + 1] * (first // ROWS) + sequence.blocks[first // ROWS :])
        poison(*pools)
        gone.write(pools, first, position + 1)
        out = _launch([(gone, position, 1)], tile_rows, pools, window)[0]
        torch.testing.assert_close(
            out[0].double(), _dense(sequence, position, window), rtol=1e-5, atol=1e-5, msg=f"row {position}"
        )


@pytest.mark.parametrize("window", [64, 100])
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_windows_verify_bits_equal_decode(columns: int, window: int) -> None:
    first, last = 250, 250 + 16
    sequence, other = Sequence(7, 300, [9, 3, 40, 7, 22]), Sequence(8, 90, [1, 2])
    alone = []
    for position in range(first, last):
        pools = _pools()
        sequence.write(pools, position + 1 - window, position + 1)
        alone.append(_launch([(sequence, position, 1)], DECODE_COLUMNS, pools, window)[0])
    pools = _pools()
    other.write(pools, 0, 90)
    sequence.write(pools, 0, first)
    for position in range(first, last, columns):
        end = min(position + columns, last)
        sequence.write(pools, position, end)
        parts = [(other, 89, 1), (sequence, position, end - position)]
        out = _launch(parts, DECODE_COLUMNS, pools, window)[1]
        assert_equal_bits(out, torch.cat(alone[position - first : end - first]), f"rows {position}..{end}")


@pytest.mark.parametrize("window", [64, 100])
def test_a_windows_prefill_bits_do_not_depend_on_what_is_left_below(window: int) -> None:
    sequence, pools = Sequence(9, 320, [9, 3, 40, 7, 22]), _pools()
    sequence.write(pools, 0, 320)
    together = torch.cat(
        _launch([(sequence, first, ROWS) for first in range(0, 320, ROWS)], ROWS, pools, window)
    )
    for first in range(0, 320, ROWS):
        bare = _pools()
        sequence.write(bare, max(0, first + 1 - window), first + ROWS)
        alone = _launch([(sequence, first, ROWS)], ROWS, bare, window)[0]
        assert_equal_bits(alone, together[first : first + ROWS], f"tile at {first}")
