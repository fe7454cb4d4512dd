"""Any sequence of calls keeps the broker equal to a model of it, and the books balanced after every step (C5)."""

from __future__ import annotations

import asyncio
import random

from tests.integration.cache_broker.bench import bench_on
from tests.property.cache_broker.walk import TTL, Walk

SEEDS = range(9, 15)  # walks that together get everywhere
STEPS = 150

MUST_REACH = {
    "evict", "exists", "leased", "parent gone", "reservation expired", "rows gone with the last child", "rows kept",
    "rows stay", "skips_pinned", "split", "split undone", "state came back", "withdrawal refused", "worker restarted",
    "a silent worker's entry gave way",
}  # fmt: skip
"""What the walks are for; one that no longer gets there proves nothing."""


def test_fr_88_fr_91_fr_92_books_balance_after_any_sequence(migrated_url: str) -> None:
    reached: set[str] = set()
    with asyncio.Runner() as runner:
        context = bench_on(migrated_url, reservation_ttl_s=TTL)
        bench = runner.run(context.__aenter__())
        try:
            for seed in SEEDS:
                walk, steps = Walk(runner, bench, random.Random(seed)), []
                try:
                    for _ in range(STEPS):
                        steps.append(walk.step())
                except Exception as error:
                    error.add_note(f"seed {seed}, after {len(steps)} steps: {'; '.join(steps[-12:])}")
                    raise
                reached |= walk.reached
        finally:
            runner.run(context.__aexit__(None, None, None))
    assert reached >= MUST_REACH
