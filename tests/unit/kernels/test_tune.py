"""The tuning tool in the interpreter: it runs every launch, and a tile that computes something else shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("triton")

from kernels import tune
from kernels.matmul import device
from kernels.matmul.tiles import Cut, RowTile, cut, row_tile

TILES = (RowTile(16, 1, 2, 4, True), RowTile(16, 1, 3, 4, True))


def _run_all(calls: Sequence[Callable[[], object]]) -> float:
    for call in calls:
        call()
    return 7.0


@pytest.fixture(autouse=True)
def _one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "row_tile", lambda rows, at: TILES[0])


def test_every_candidate_is_timed_and_compared() -> None:
    packed = tune.weights(136, 72, "cpu", cold_bytes=1)
    figures = tune.measure("small", packed, 3, TILES, _run_all)
    assert [figure.tile for figure in figures] == list(TILES)
    assert all(figure.same_bits and figure.microseconds == 7.0 for figure in figures)


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
def test_the_tiles_in_use_are_among_the_candidates(rows: int) -> None:
    assert {row_tile(rows, cut(n, k)) for n, k in tune.SHAPES.values()} <= set(tune.CANDIDATES)


def test_a_launch_that_does_nothing_is_seen() -> None:
    packed = tune.weights(136, 72, "cpu", cold_bytes=1)
    (figure,) = tune.measure("small", packed, 3, TILES[:1], lambda calls: 0.1)
    assert not figure.same_bits


def test_weights_pass_the_cache_by() -> None:
    assert len(tune.weights(128, 64, "cpu", cold_bytes=2 * 128 * 64 * 5)) == 5


def test_launches_that_the_workspace_does_not_hold_are_refused() -> None:
    (packed, *_), tile = tune.weights(136, 72, "cpu", cold_bytes=1), TILES[0]
    x = packed.weight.new_zeros(device.MOST_ROWS + 1, 72)
    with pytest.raises(ValueError, match="workspace"):
        device.stream_product(x, packed, x.new_empty(len(x), 136), tile, Cut(2, 2, 1, 0, 2))
