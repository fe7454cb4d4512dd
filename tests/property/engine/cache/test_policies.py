"""Every eviction policy is a total order over its candidates that neither loses one nor looks at their sequence."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.cache.evict import POLICIES, Candidate, Policy, choose, worst_first
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.config import FULL, LINEAR
from services.gpu_worker.engine.models.random import TINY

NOW = 60

candidates = st.lists(
    st.builds(
        Candidate,
        key=st.binary(min_size=1, max_size=2),
        used_at=st.integers(0, NOW),
        replay_tokens=st.integers(1, 64).map(lambda blocks: 64 * blocks),
        blocks=st.integers(0, 9),
        snapshots=st.integers(0, 1),
        flops_per_byte=st.floats(0, 1e6),
    ),
    max_size=12,
    unique_by=lambda candidate: candidate.key,
)
quick = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("name", POLICIES)
@given(found=candidates, seed=st.integers(0, 99))
@quick
def test_a_policy_reorders_and_forgets_the_sequence(name: str, found: list[Candidate], seed: int) -> None:
    policy: Policy = POLICIES[name]
    shuffled = random.Random(seed).sample(found, len(found))
    order = policy(found, NOW)
    assert sorted(order, key=lambda c: c.key) == sorted(found, key=lambda c: c.key)
    assert policy(shuffled, NOW) == order


@pytest.mark.parametrize("name", POLICIES)
@given(found=candidates, blocks=st.integers(0, 30), snapshots=st.integers(0, 6))
@quick
def test_choosing_frees_enough_or_all_there_is_and_nothing_in_vain(
    name: str, found: list[Candidate], blocks: int, snapshots: int
) -> None:
    keys = choose(found, blocks=blocks, snapshots=snapshots, now=NOW, policy=POLICIES[name])
    by_key = {candidate.key: candidate for candidate in found}
    freed_blocks = sum(by_key[key].blocks for key in keys)
    freed_snapshots = sum(by_key[key].snapshots for key in keys)
    assert len(set(keys)) == len(keys)
    assert freed_blocks >= min(blocks, sum(candidate.blocks for candidate in found))
    assert freed_snapshots >= min(snapshots, sum(candidate.snapshots for candidate in found))
    if keys:
        rest = [by_key[key] for key in keys[:-1]]
        assert sum(c.blocks for c in rest) < blocks or sum(c.snapshots for c in rest) < snapshots
    assert all((blocks and by_key[key].blocks) or (snapshots and by_key[key].snapshots) for key in keys)


@given(found=candidates)
@quick
def test_lru_is_the_order_of_use(found: list[Candidate]) -> None:
    assert POLICIES["lru"](found, NOW) == sorted(found, key=lambda c: (c.used_at, c.key))


@given(found=candidates)
@quick
def test_ours_never_keeps_what_is_worse_in_every_term(found: list[Candidate]) -> None:
    place = {candidate.key: index for index, candidate in enumerate(worst_first(found, NOW))}
    for one in found:
        for other in found:
            worse = (
                one.used_at < other.used_at
                and one.replay_tokens <= other.replay_tokens
                and one.flops_per_byte <= other.flops_per_byte
            )
            assert not worse or place[one.key] < place[other.key]


@given(cuts=st.lists(st.integers(0, 9000), min_size=3, max_size=3).map(sorted))
@quick
def test_flops_add_up_along_a_prompt_and_later_rows_cost_more(cuts: list[int]) -> None:
    prices = Prices.of(TINY)
    low, middle, high = cuts
    assert prices.flops(low, middle) + prices.flops(middle, high) == prices.flops(low, high)
    width = high - middle
    assert prices.flops(middle, high) >= prices.flops(0, width)


def test_prices_of_the_published_27b_hybrid() -> None:
    """64 layers, 5,120 wide, 24/4 heads of 256, 48 value heads of 128: 151 MB of float32 state."""
    dims = replace(
        TINY,
        hidden=5120,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 16,
        heads=24,
        kv_heads=4,
        head_dim=256,
        gdn_key_heads=16,
        gdn_value_heads=48,
        gdn_key_dim=128,
        gdn_value_dim=128,
        has_mtp=False,
    )
    prices = Prices.of(dims)
    states = 48 * 48 * 128 * 128 * 4
    windows = 48 * (dims.conv_kernel - 1) * (2 * 16 * 128 + 48 * 128) * 4
    assert states == 150_994_944
    assert prices.state_bytes == states + windows + 5120 * 4
    assert prices.block_bytes == 16 * 2 * 4 * 256 * 4 * 64


def test_an_entry_that_frees_nothing_saves_nothing_a_byte() -> None:
    prices = Prices.of(TINY)
    assert prices.flops_per_byte(start=0, stop=64, blocks=0, states=0) == 0.0
    one = prices.flops_per_byte(start=0, stop=64, blocks=1, states=1)
    assert prices.flops_per_byte(start=0, stop=64, blocks=1, states=0) > one > 0
