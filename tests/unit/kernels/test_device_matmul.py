"""The card's products in Triton's interpreter, float32: against float64 and the row gate, with poisoned outputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.matmul import device, tiles
from kernels.matmul.packed import Packed, Recipe
from kernels.norm_rope import added
from kernels.testing import assert_equal_bits

SHAPES = [(128, 64), (136, 72), (256, 1200), (40, 520), (264, 136)]
"""(N, K): one unit; ragged both ways; a column tile shared by several programs; more K than N."""


def _draw(rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * 7 + k)
    return torch.randn(rows, k, generator=generator), torch.randn(n, k, generator=generator)


def _poisoned_parts() -> None:
    parts, arrivals = device._workspace(torch.device("cpu"), 1)
    parts.fill_(torch.nan)
    assert not arrivals.any()


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_product_is_right(nan_filled_empty: None, n: int, k: int, prefill: bool) -> None:
    x, weight = _draw(67, n, k)
    _poisoned_parts()
    got = device.linear(x, device.pack(weight, "card"), prefill=prefill)
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)
    _poisoned_parts()


@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_rows_keep_their_bits(prefill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Here numpy multiplies, whose bits belong to a tile's shape; that the card's do not is the gate's to show.
    monkeypatch.setattr(device, "row_tile", lambda rows, at, programs: tiles.RowTile(64, 1, 2, 4, True))
    x, weight = _draw(130, 136, 600)
    packed = device.pack(weight, "card")
    whole = device.linear(x, packed, prefill=prefill)
    for first, count in ((0, 1), (5, 1), (64, 2), (63, 65), (129, 1)):
        part = device.linear(x[first : first + count].clone(), packed, prefill=prefill)
        assert_equal_bits(part, whole[first : first + count], f"{count} rows from {first}")


@pytest.mark.parametrize(("n", "k", "slices"), [(128, 1200, 2), (264, 2048, 4)])
def test_parts_add_up_to_the_product_bit_for_bit(
    nan_filled_empty: None, n: int, k: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "MOST_ROWS", 16)  # two launches
    x, weight = _draw(19, n, k)
    packed = device.pack(weight, "card")
    parts = device.linear_parts(x, packed)
    assert parts.shape == (slices, 19, n)
    assert parts.dtype is torch.float32
    assert_equal_bits(added(parts, x.dtype), device.linear(x, packed), "the sum")


@pytest.mark.parametrize(
    ("recipe", "n", "k", "prefill"),
    [
        ("card", 128, 1200, True),
        ("card-fp8", 128, 1200, False),
        ("card", 136, 72, False),
        ("padded", 128, 1200, False),
    ],
)
def test_what_has_no_parts_is_the_product(recipe: Recipe, n: int, k: int, prefill: bool) -> None:
    x, weight = _draw(3, n, k)
    packed = device.pack(weight, recipe)
    whole = device.linear(x, packed, prefill=prefill)
    assert_equal_bits(device.linear_parts(x, packed, prefill=prefill), whole, "the product")


@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_pairs_give_the_activation(nan_filled_empty: None, prefill: bool) -> None:
    x, weight = _draw(3, 272, 136)
    got = device.linear_swiglu(x, device.pack(weight, "card", pairs=True), prefill=prefill)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    torch.testing.assert_close(got.double(), gate * gate.sigmoid() * up, rtol=1e-4, atol=1e-3)


def test_float8_channels_have_their_own_scale(nan_filled_empty: None) -> None:
    x, weight = _draw(2, 136, 72)
    weight *= torch.logspace(-3, 3, 136)[:, None]
    weight[7] = 0.0
    got = device.linear(x, device.pack(weight, "card-fp8")).double()
    exact = x.double() @ weight.double().T
    assert not got[:, 7].any()
    gap = (got - exact).norm(dim=0) / (x.double().norm() * weight.double().norm(dim=1)).clamp_min(1e-30)
    assert gap.max() < 0.03


def test_misuse_is_refused() -> None:
    x, weight = _draw(1, 128, 64)
    with pytest.raises(ValueError, match="pairs"):
        device.linear(x, device.pack(weight, "card", pairs=True))
    with pytest.raises(ValueError, match="pairs"):
        device.linear_swiglu(x, device.pack(weight, "card"))
    with pytest.raises(ValueError, match="recipe"):
        device.pack(weight, "tiled")


@pytest.mark.parametrize(
    ("n", "k", "slices", "each", "runs"),
    [
        (34816, 5120, 0, 166, 132),
        (5120, 17408, 3, 0, 120),
        (16480, 5120, 1, 0, 129),
        (14336, 5120, 1, 0, 112),
        (248320, 5120, 0, 1200, 130),
        (9216, 2560, 0, 22, 131),
        (2048, 4096, 8, 0, 128),
        (8, 8, 1, 0, 1),
    ],
)
def test_the_cut_is_a_function_of_the_shape(n: int, k: int, slices: int, each: int, runs: int) -> None:
    at = tiles.cut(n, k)
    assert (at.slices, at.each, at.runs) == (slices, each, runs)
    assert at.steps % 2 == at.each % 2 == 0
    if not slices:
        assert (at.runs - 1) * at.each < at.tiles * at.steps <= at.runs * at.each


@pytest.mark.parametrize(
    ("n", "k", "programs", "runs"),
    [
        (34816, 5120, 3, 389),
        (5120, 17408, 3, 360),
        (16480, 5120, 2, 258),
        (5120, 6144, 2, 240),
        (248320, 5120, 3, 388),
        (8, 8, 2, 1),
    ],
)
def test_float8_has_programs_enough_to_read_while_one_widens(
    n: int, k: int, programs: int, runs: int
) -> None:
    assert tiles.programs_of(n, k, float8=False) == 1
    assert tiles.programs_of(n, k, float8=True) == programs
    at = tiles.cut(n, k, programs=programs)
    assert at.runs == runs <= programs * tiles.RUNS
    assert (at.tiles, at.steps) == (tiles.cut(n, k).tiles, tiles.cut(n, k).steps)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("deep", [1, 2])
@pytest.mark.parametrize(
    "at", [tiles.Cut(3, 20, 2, 0, 6), tiles.Cut(3, 20, 0, 14, 5), tiles.Cut(3, 20, 0, 40, 2)]
)
def test_every_row_tile_and_cut_computes_the_same(
    nan_filled_empty: None, swap: bool, deep: int, at: tiles.Cut
) -> None:
    x, weight = _draw(19, 264, 1200)
    packed = device.pack(weight, "card")
    out = torch.empty(19, 264)
    device.stream_product(x, packed, out, tiles.RowTile(16, deep, 2, 4, swap), at)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


def test_the_row_tile_follows_the_rows_and_the_cut() -> None:
    whole, sliced = tiles.cut(16480, 5120), tiles.cut(5120, 17408)
    for rows, height in ((1, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, 128), (256, 128)):
        for at in (whole, sliced):
            assert all(tiles.row_tile(rows, at, programs=p).rows == height for p in (1, 2, 3))
    assert tiles.row_tile(64, whole).warps == 8
    assert tiles.row_tile(64, sliced).warps == 4


def test_the_next_launch_comes_late_where_rows_are_many() -> None:
    for at in (tiles.cut(16480, 5120), tiles.cut(5120, 17408)):
        late = {rows: tiles.row_tile(rows, at).late for rows in (1, 16, 32, 64, 128)}
        assert late == {1: False, 16: False, 32: False, 64: True, 128: True}


def test_padded_baseline_takes_any_row_count() -> None:
    x, weight = _draw(67, 40, 72)
    packed: Packed = device.pack(weight, "padded")
    torch.testing.assert_close(device.linear(x, packed), x @ weight.T, rtol=1e-5, atol=1e-4)
    assert_equal_bits(device.linear(x[3:4], packed), device.linear(x, packed)[3:4], "row 3")
