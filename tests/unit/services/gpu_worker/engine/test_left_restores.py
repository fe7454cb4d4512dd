"""FR-77: callers leave while entries are brought back from the host tier, five hundred times; some copies are damaged then.
After every ten each pool is what it was, and at the end the stream is still the cold one."""

from __future__ import annotations

import random

import torch

from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.limits import EngineLimits
from tests.engine_kit import WARM, Driver, baseline, build, prompt, request, run_one

ROUNDS = 500
PROMPT = prompt(75, seed=4)


def test_fr_77_five_hundred_cancellations_while_entries_come_back_leave_every_pool_as_it_was() -> None:
    engine, draw = build(limits=EngineLimits(burst_rounds=1), host_tier_bytes=10**9), random.Random(77)
    expected = run_one(build(), request(PROMPT, "cold", sampling=WARM, use_cache=False, max_tokens=20)).tokens
    left, restored, missed = 0, 0, 0
    for number in range(ROUNDS):
        if not engine.stats().entries:
            run_one(engine, request(PROMPT, f"fill {number}", sampling=WARM, max_tokens=1))
        keys = [entry.key for entry in engine._cache.tree.entries()]
        engine.spill(keys)
        if number % 50 == 49:
            (entry, *_) = engine._cache.tree.entries()
            assert entry.host is not None
            entry.host.values.view(-1).view(torch.int32)[5] ^= 1
        driver = Driver(engine)
        item = request(PROMPT, f"r{number}", sampling=WARM, max_tokens=20)
        driver.submit(item)
        for _ in range(draw.randrange(3)):
            driver.step()
        engine.cancel(item.request_id, "client_disconnected")
        outcome = driver.run()[item.key]
        left += outcome.end.reason is FinishReason.CANCELLED
        restored += outcome.cached_tokens > 0
        assert outcome.tokens == expected[: len(outcome.tokens)]
        if number % 10 == 9:
            baseline(engine)
        missed = engine.stats().mismatches
        if engine.pressure().ruined:
            engine.evict(keys)
    assert left == ROUNDS
    assert restored > ROUNDS // 3
    assert missed > 0
    whole = run_one(engine, request(PROMPT, "whole", sampling=WARM, speculation_k=2, max_tokens=20))
    assert whole.tokens == expected
    while keys := engine.eviction_candidates(10**6, 10**6):
        engine.evict(keys)
    stats = engine.stats()
    assert (stats.blocks.free, stats.slots.free, stats.snapshots.free) == (
        stats.blocks.total,
        stats.slots.total,
        stats.snapshots.total,
    )
    assert stats.host_bytes == 0
