"""The host tier against the real pools: what comes back is bit-equal, what is not is never handed out."""

from __future__ import annotations

import pytest
import torch

from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.offload import HostCopy, HostTier, Pools
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.models.random import TINY

PRICES = Prices.of(TINY)
HIDDEN = torch.arange(TINY.hidden, dtype=torch.float32)


class Rig:
    """Two pools full of noise and a tier over them."""

    def __init__(self, budget: int) -> None:
        noise = torch.Generator().manual_seed(3)
        self.kv = KVPool(TINY, 4)
        self.states = StatePool(TINY, 2, 3, 4)
        for tensor in (self.kv.k, self.kv.v, self.states.state, self.states.windows):
            tensor.normal_(generator=noise)
        self.states.reset(1)
        self.states.advanced(0, 128)
        self.states.take_snapshot(0, 0)
        self.tier = HostTier(budget, Pools(self.kv, self.states))

    def block(self) -> HostCopy:
        copy = self.tier.take_block(1)
        assert copy is not None
        return copy

    def state(self) -> HostCopy:
        copy = self.tier.take_state(0, HIDDEN)
        assert copy is not None
        return copy


def test_a_block_comes_back_bit_equal_in_another_place() -> None:
    rig = Rig(10**9)
    k, v = rig.kv.k[:, 1].clone(), rig.kv.v[:, 1].clone()
    copy = rig.block()
    rig.kv.k[:, 1] = float("nan")
    assert rig.tier.bring_block(copy, 3)
    assert torch.equal(rig.kv.k[:, 3], k)
    assert torch.equal(rig.kv.v[:, 3], v)


def test_a_state_comes_back_bit_equal_with_its_hidden_and_position() -> None:
    rig = Rig(10**9)
    copy = rig.state()
    before = rig.states.state[:, 0].clone(), rig.states.windows[:, 0, : rig.states.taps].clone()
    hidden = rig.tier.bring_state(copy, 2)
    assert hidden is not None
    assert torch.equal(hidden, HIDDEN)
    rig.states.restore(2, 1)
    assert rig.states.position(1) == 128
    assert torch.equal(rig.states.state[:, 1], before[0])
    assert torch.equal(rig.states.windows[:, 1, : rig.states.taps], before[1])


def test_copies_weigh_what_the_prices_say_and_the_budget_holds() -> None:
    rig = Rig(PRICES.size(2, 1))
    rig.block()
    rig.state()
    second = rig.block()
    assert rig.tier.free == 0
    assert rig.tier.take_block(0) is None
    assert rig.tier.take_state(0, HIDDEN) is None
    rig.tier.drop(second)
    assert rig.tier.free == PRICES.block_bytes
    assert rig.tier.taken == 3


def test_without_a_budget_nothing_is_taken() -> None:
    rig = Rig(0)
    assert rig.tier.take_block(0) is None
    assert rig.tier.take_state(0, HIDDEN) is None
    assert (rig.tier.used, rig.tier.taken) == (0, 0)


@pytest.mark.parametrize("place", [0, 77, -1])
def test_fr_7_a_changed_byte_of_a_block_is_found(place: int) -> None:
    rig = Rig(10**9)
    copy = rig.block()
    copy.values.view(-1).view(torch.int32)[place] ^= 1
    assert not rig.tier.bring_block(copy, 3)
    assert (rig.tier.brought, rig.tier.mismatches) == (0, 1)


@pytest.mark.parametrize("place", [0, 77, -1])
def test_fr_7_a_changed_byte_of_a_state_or_of_its_hidden_is_found(place: int) -> None:
    rig = Rig(10**9)
    copy = rig.state()
    copy.values.view(torch.int32)[place] ^= 1 << 30
    assert rig.tier.bring_state(copy, 2) is None
    assert rig.tier.mismatches == 1
