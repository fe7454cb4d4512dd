"""Entries that gave way to the host tier come back as the same bits, or not at all."""

from __future__ import annotations

import pytest
import torch

from services.gpu_worker.engine.cache.offload import HostCopy
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import HitDropped
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest
from tests.engine_kit import WARM, Driver, Outcome, build, prompt, request, run_one

LONG = prompt(330, seed=4)
PLENTY = 10**9


def turn(name: str, **fields: object) -> GenerateRequest:
    """The same long prompt, sampled and speculative, so that state, rows, draft rows and hidden all matter."""
    return request(LONG, name, sampling=WARM, speculation_k=3, max_tokens=10, **fields)  # type: ignore[arg-type]


def cold() -> list[int]:
    return run_one(build(), turn("cold", use_cache=False)).tokens


def spill_all(engine: Engine) -> None:
    assert engine.spill([entry.key for entry in engine._cache.tree.entries()])
    engine.check()


def copies(engine: Engine) -> list[HostCopy]:
    tree = engine._cache.tree
    rows = [node.host for node in tree.nodes() if node.host is not None]
    return rows + [entry.host for entry in tree.entries() if entry.host is not None]


def empty(engine: Engine) -> None:
    """Everything can be dropped, and every pool is whole again."""
    while keys := engine.eviction_candidates(10**6, 10**6):
        engine.evict(keys)
    engine.check()
    stats = engine.stats()
    assert (stats.blocks.free, stats.snapshots.free) == (stats.blocks.total, stats.snapshots.total)
    assert (stats.entries, stats.host_bytes) == (0, 0)


def test_fr_7_what_was_spilled_comes_back_as_the_same_stream_twice() -> None:
    engine, expected = build(host_tier_bytes=PLENTY), cold()
    assert run_one(engine, turn("first", capture_at=64)).tokens == expected
    before = engine.stats()
    spill_all(engine)
    spilled = engine.stats()
    assert spilled.blocks.free == spilled.blocks.total
    assert spilled.snapshots.free == spilled.snapshots.total
    assert spilled.entries == before.entries == 2
    for name in ("again", "and again"):
        warm = run_one(engine, turn(name))
        assert (warm.tokens, warm.cached_tokens) == (expected, 320)
        engine.check()
    stats = engine.stats()
    assert (stats.mismatches, stats.brought_back) == (0, 6)
    empty(engine)


@pytest.mark.parametrize("which", [0, 2, -1], ids=["first block", "third block", "state"])
def test_fr_7_wrong_bytes_are_a_miss_and_the_entry_goes(which: int) -> None:
    engine, expected = build(host_tier_bytes=PLENTY), cold()
    run_one(engine, turn("first"))
    spill_all(engine)
    copies(engine)[which].values.view(-1).view(torch.int32)[5] ^= 1
    driver = Driver(engine)
    missed = driver.run([turn("missed")])["missed", 0]
    assert (missed.tokens, missed.cached_tokens) == (expected, 0)
    assert any(isinstance(event, HitDropped) for event in driver.events)
    assert engine.stats().mismatches == 1
    engine.check()
    again = run_one(engine, turn("again"))
    assert (again.tokens, again.cached_tokens) == (expected, 320)
    empty(engine)


def test_wrong_bytes_are_named_for_withdrawal_until_they_are_evicted() -> None:
    engine = build(host_tier_bytes=PLENTY)
    (key,) = [captured.key for captured in run_one(engine, turn("first")).captured]
    spill_all(engine)
    copies(engine)[0].values[:] = 0.0
    item = turn("missed")
    engine.lookup("missed", item.root, item.tokens, item.chain)
    engine.submit(item)
    engine.step()
    pressure = engine.pressure()
    assert (pressure.blocks, pressure.snapshots, pressure.ruined) == (0, 0, 1)
    assert engine.eviction_candidates(pressure.blocks, pressure.snapshots) == [key]
    assert engine.evict([key]).gone == (key,)
    assert not engine.pressure()
    engine.check()


def test_fr_8_a_hit_needs_every_row_and_the_state() -> None:
    """Take one block's copy away behind the cache's back: the entry is no hit, whatever else is there."""
    engine = build(host_tier_bytes=PLENTY)
    run_one(engine, turn("first"))
    spill_all(engine)
    node = next(node for node in engine._cache.tree.nodes() if node.position == 128)
    assert node.host is not None
    engine._cache.tier.drop(node.host)
    node.host = None
    item = turn("other")
    assert engine.lookup("other", item.root, item.tokens, item.chain) is None


def fill(engine: Engine, count: int) -> dict[str, Outcome]:
    """Prompts of their own, one after another."""
    return {
        f"p{seed}": run_one(engine, request(prompt(200, seed=seed), f"p{seed}", sampling=WARM))
        for seed in range(count)
    }


def test_under_pressure_entries_move_and_nothing_is_evicted_while_there_is_room() -> None:
    engine = build(
        num_blocks=12, num_slots=2, max_batch=2, num_snapshots=4, max_context=512, host_tier_bytes=PLENTY
    )
    first = fill(engine, 6)
    stats = engine.stats()
    assert stats.entries == 6
    assert stats.spilled > 0
    assert not engine.pressure()
    for seed in range(6):
        again = run_one(engine, request(prompt(200, seed=seed), f"again{seed}", sampling=WARM))
        assert again.tokens == first[f"p{seed}"].tokens
        assert again.cached_tokens == 192
        engine.check()
    empty(engine)


def test_the_least_recent_copies_go_when_the_tier_is_full() -> None:
    probe = build()
    room = 2 * (3 * probe.kv.block_bytes + probe.state_bytes)
    engine = build(
        num_blocks=12, num_slots=2, max_batch=2, num_snapshots=4, max_context=512, host_tier_bytes=room
    )
    first = fill(engine, 7)
    stats = engine.stats()
    assert 0 < stats.host_bytes <= room
    assert stats.entries < 7
    hits = {}
    for seed in reversed(range(7)):
        again = run_one(engine, request(prompt(200, seed=seed), f"again{seed}", sampling=WARM))
        assert again.tokens == first[f"p{seed}"].tokens
        hits[seed] = again.cached_tokens
        engine.check()
    assert hits[6] == hits[5] == 192
    assert hits[0] == 0
    empty(engine)


def test_two_requests_share_what_one_of_them_brought_back() -> None:
    engine, expected = build(host_tier_bytes=PLENTY), cold()
    run_one(engine, turn("first"))
    spill_all(engine)
    outcomes = Driver(engine).run([turn("one"), turn("two"), turn("three")])
    assert all(outcome.tokens == expected for outcome in outcomes.values())
    assert all(outcome.cached_tokens == 320 for outcome in outcomes.values())
    assert engine.stats().brought_back == 6
    empty(engine)


def test_choices_of_one_request_share_a_spilled_hit() -> None:
    engine = build(host_tier_bytes=PLENTY)
    run_one(engine, turn("first"))
    spill_all(engine)
    driver = Driver(engine)
    outcomes = driver.run([turn("many", choice=choice) for choice in range(3)])
    assert [outcome.cached_tokens for outcome in outcomes.values()] == [320] * 3
    empty(engine)


def test_without_a_snapshot_to_come_back_to_a_spilled_hit_is_a_miss() -> None:
    """Every snapshot is held by a capture that the broker has not answered."""
    engine = build(num_snapshots=1, host_tier_bytes=PLENTY, limits=EngineLimits(max_pending_captures=4))
    run_one(engine, turn("first"))
    spill_all(engine)
    other = request(prompt(70, seed=9), "other", max_tokens=1)
    engine.submit(other)
    while engine.has_work():
        engine.step()
    item = turn("warm")
    assert engine.lookup("warm", item.root, item.tokens, item.chain) is not None
    assert Driver(engine).run([item])["warm", 0].cached_tokens == 0
    assert engine.stats().mismatches == 0
    engine.check()
