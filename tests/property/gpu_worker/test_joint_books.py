"""Whatever the order of primes, publications, evictions and losses: the broker charges what the worker keeps (C5)."""

from __future__ import annotations

import random

import pytest

from tests.integration.cache_broker.bench import bench_on
from tests.property.gpu_worker.joint import HOST_BYTES, TTL, Joint

WALKS, STEPS = 10, 250

MUST_REACH = {
    "captured revival", "captured rows", "captured split", "lingering", "orphan", "pressure", "published", "quota",
    "skips_pinned",
}  # fmt: skip
MUST_LOSE = {
    "Commit answer lost", "Commit question lost", "Freed answer lost", "Reserve question lost",
    "split answer lost", "broker_away", "uncommitted",
}  # fmt: skip
"""What the walks are for; one that no longer gets there proves nothing."""


MUST_SPILL = {"spilled", "missed", "published", "pressure"}


@pytest.mark.parametrize(
    ("faults", "host_bytes"),
    [(False, 0), (True, 0), (True, HOST_BYTES)],
    ids=["whole", "losses", "host tier"],
)
async def test_c5_the_books_are_the_bytes_in_every_order(
    migrated_url: str, faults: bool, host_bytes: int
) -> None:
    reached: set[str] = set()
    async with bench_on(migrated_url, reservation_ttl_s=TTL) as bench:
        for seed in range(WALKS):
            walk = Joint(bench, random.Random(seed), faults=faults, host_bytes=host_bytes)
            await walk.begin(f"tenant-{seed}")
            try:
                for _ in range(STEPS):
                    await walk.step()
                await walk.settle()
            except Exception as error:
                error.add_note(f"seed {seed}, step {len(walk.steps)}: {'; '.join(walk.steps[-25:])}")
                raise
            finally:
                await walk.end()
            reached |= walk.reached | walk.outcomes()
    wanted = MUST_SPILL if host_bytes else MUST_REACH | (MUST_LOSE if faults else set())
    missing = wanted - reached
    assert missing == set()
