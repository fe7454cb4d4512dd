"""Row-exact matmul: both recipes against the gate and against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import matmul
from kernels.matmul import reference
from kernels.testing import assert_row_exact


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize(("n", "k"), [(776, 320), (200, 64), (320, 960), (64, 128), (7, 20)])
@pytest.mark.parametrize("recipe", ["onednn", "tiled"])
def test_rows_keep_their_bits(recipe: matmul.Recipe, n: int, k: int, generator: torch.Generator) -> None:
    packed = matmul.pack(torch.randn(n, k, generator=generator), recipe)
    # MKL cuts a long K among threads, so the fallback's bits belong to a thread count; the fingerprint names it.
    x = torch.randn(200, k, generator=generator)
    assert_row_exact(lambda rows: matmul.linear(rows, packed), [x], across_threads=recipe == "onednn")


@pytest.mark.parametrize("recipe", ["onednn", "tiled"])
def test_product_is_right(recipe: matmul.Recipe, generator: torch.Generator) -> None:
    weight, x = torch.randn(40, 64, generator=generator), torch.randn(5, 64, generator=generator)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(
        matmul.linear(x, matmul.pack(weight, recipe)).double(), exact, rtol=1e-5, atol=1e-5
    )


def test_self_test_takes_the_first_recipe_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "row_exact", lambda packed, _: packed.recipe == "tiled")
    reference._holds.cache_clear()
    assert matmul.choose_recipe([(8, 16)]) == "tiled"
    monkeypatch.setattr(reference, "row_exact", lambda *_: False)
    reference._holds.cache_clear()
    with pytest.raises(matmul.NotRowExact):
        matmul.choose_recipe([(8, 16)])
    reference._holds.cache_clear()


def test_self_test_sees_a_row_count_that_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = reference.linear

    def shifty(x: torch.Tensor, packed: matmul.Packed) -> torch.Tensor:
        return honest(x, packed) * (1.0 if x.shape[0] != 3 else 1.0 + 1e-6)

    packed = matmul.pack(torch.randn(16, 32), "tiled")
    assert matmul.row_exact(packed, 32)
    monkeypatch.setattr(reference, "linear", shifty)
    assert not matmul.row_exact(packed, 32)
