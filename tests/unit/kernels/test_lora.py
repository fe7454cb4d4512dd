"""Adapters by row: values, rows without one, and bits in any company; the twin and the interpreted device kernels."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.lora import NONE, AdapterSlots, device, reference
from kernels.matmul.packed import Recipe

SLOTS, RANK, N, K = 4, 16, 136, 72
BOTH = pytest.mark.parametrize(
    ("way", "recipe"), [(reference, "onednn"), (device, "card")], ids=["twin", "card"]
)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _adapters(way: ModuleType, recipe: Recipe, k: int = K) -> AdapterSlots:
    made: AdapterSlots = way.slots(SLOTS, RANK, N, k, recipe, torch.zeros(1))
    for slot, rank in ((0, 16), (2, 4), (3, 7)):
        way.load(
            made, slot, _normal(rank, k, seed=slot) * k**-0.5, _normal(N, rank, seed=9 + slot), 0.5 + slot
        )
    return made


def _exact(base: Tensor, x: Tensor, index: list[int]) -> Tensor:
    out, k = base.double().clone(), x.shape[1]
    for row, slot in enumerate(index):
        if slot != NONE:
            rank = {0: 16, 2: 4, 3: 7}[slot]
            a, b = _normal(rank, k, seed=slot) * k**-0.5, _normal(N, rank, seed=9 + slot)
            out[row] += (0.5 + slot) * (b.double() @ (a.double() @ x[row].double()))
    return out


def _run(
    way: ModuleType, adapters: AdapterSlots, base: Tensor, x: Tensor, index: list[int], prefill: bool = False
) -> Tensor:
    rows = way.rows_of(torch.tensor(index, dtype=torch.int32), SLOTS, prefill=prefill)
    told: Tensor = way.add(base.clone(), x, adapters, rows)
    return told


@BOTH
@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("k", [72, 2056])
def test_values(way: ModuleType, recipe: Recipe, prefill: bool, k: int) -> None:
    index = [0, NONE, 2, 0, 3, NONE, 2]
    base, x = _normal(7, N, seed=20), _normal(7, k, seed=21)
    told = _run(way, _adapters(way, recipe, k), base, x, index, prefill)
    exact = _exact(base, x, index)
    assert (told.double() - exact).norm() / exact.norm() < 1e-6


@BOTH
def test_a_row_without_an_adapter_is_the_base_to_the_bit(way: ModuleType, recipe: Recipe) -> None:
    base, x = _normal(9, N, seed=22), _normal(9, K, seed=23)
    base[1] = -0.0
    index = [0, NONE, 3] * 3
    told = _run(way, _adapters(way, recipe), base, x, index)
    for row in range(1, 9, 3):
        assert torch.equal(told[row].view(torch.int32), base[row].view(torch.int32))
    assert torch.equal(_run(way, _adapters(way, recipe), base, x, [NONE] * 9), base)


@BOTH
@pytest.mark.parametrize("prefill", [False, True])
def test_a_row_keeps_its_bits(way: ModuleType, recipe: Recipe, prefill: bool) -> None:
    adapters = _adapters(way, recipe)
    base, x = _normal(40, N, seed=24), _normal(40, K, seed=25)
    index = [(0, NONE, 2, 3, 2)[row % 5] for row in range(39)] + [0]
    whole = _run(way, adapters, base, x, index, prefill)
    for first, count in ((0, 1), (39, 1), (2, 17), (11, 28)):
        rows = slice(first, first + count)
        told = _run(way, adapters, base[rows], x[rows].clone(), index[rows], prefill)
        assert torch.equal(told, whole[rows])
    bad = x.clone()
    bad[::2] = torch.nan
    told = _run(way, adapters, base, bad, index, prefill)
    assert torch.equal(told[1::2], whole[1::2])


@BOTH
def test_the_slot_leaves_no_trace(way: ModuleType, recipe: Recipe) -> None:
    adapters = _adapters(way, recipe)
    way.load(adapters, 1, _normal(4, K, seed=2) * K**-0.5, _normal(N, 4, seed=11), 2.5)
    base, x = _normal(3, N, seed=26), _normal(3, K, seed=27)
    assert torch.equal(_run(way, adapters, base, x, [1, 2, 0])[0], _run(way, adapters, base, x, [2, 0, 0])[0])


@BOTH
def test_a_rank_that_does_not_fit_is_refused(way: ModuleType, recipe: Recipe) -> None:
    adapters = way.slots(1, RANK, N, K, recipe, torch.zeros(1))
    with pytest.raises(ValueError, match="pass 16"):
        way.load(adapters, 0, torch.zeros(17, K), torch.zeros(N, 17), 1.0)
    with pytest.raises(ValueError, match="do not agree"):
        way.load(adapters, 0, torch.zeros(4, K), torch.zeros(N, 5), 1.0)


def test_an_empty_slot_adds_nothing_on_a_card_and_is_an_error_in_the_twin() -> None:
    base, x = _normal(2, N, seed=28), _normal(2, K, seed=29)
    adapters = _adapters(device, "card")
    device.unload(adapters, 0)
    assert torch.equal(_run(device, adapters, base, x, [0, NONE]), base)
    with pytest.raises(ValueError, match="no adapter"):
        _run(reference, _adapters(reference, "onednn"), base, x, [1, NONE])
