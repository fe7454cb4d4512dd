"""Fixtures of the broker's integration tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.cache_broker.bench import Bench, bench_on


@pytest.fixture
async def bench(migrated_url: str) -> AsyncIterator[Bench]:
    """Handlers on a fresh database, with a clock that stands still."""
    async with bench_on(migrated_url) as made:
        yield made
