"""A capture in the middle of an entry's rows: rows pass over, and no byte comes or goes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.cache_broker.bench import Bench, key

SPLIT: dict[str, Any] = {"splits": key("long"), "position": 128, "state_bytes": 60, "kv_bytes": 30}


@pytest.fixture
async def tenant(bench: Bench) -> str:
    """With one entry at 256: 60 bytes of state, 80 of rows."""
    made = await bench.tenant(cache_bytes=300)
    await bench.publish(made, "long", position=256, kv_bytes=80)
    return made


async def entry(bench: Bench, name: str) -> Any:
    rows = await bench.rows(f"SELECT * FROM entries WHERE key = '\\x{key(name).hex()}'")
    return rows[0] if rows else None


async def test_rows_pass_over_and_only_the_new_state_is_added(bench: Bench, tenant: str) -> None:
    await bench.publish(tenant, "branch", **SPLIT)
    assert await bench.balanced() == {"acme": 200}
    long, branch = await entry(bench, "long"), await entry(bench, "branch")
    assert (long.parent, long.parent_position, long.kv_bytes) == (key("branch"), 128, 50)
    assert (branch.parent, branch.kv_bytes) == (None, 30)
    await bench.publish(tenant, "other", parent=key("branch"), parent_position=128, position=192, kv_bytes=10)
    assert await bench.balanced() == {"acme": 270}


async def test_an_abort_gives_them_back(bench: Bench, tenant: str) -> None:
    reply = await bench.reserve(tenant, "branch", **SPLIT)
    await bench.abort(reply.reservation_id)
    long = await entry(bench, "long")
    assert (long.parent, long.parent_position, long.kv_bytes) == (None, 0, 80)
    assert await entry(bench, "branch") is None
    assert await bench.balanced() == {"acme": 140}


async def test_an_expired_reservation_keeps_the_rows_apart(bench: Bench, tenant: str) -> None:
    """The worker may have split before it died of silence; the sum is right either way."""
    await bench.reserve(tenant, "branch", **SPLIT)
    bench.clock.advance(bench.settings.reservation_ttl_s)
    await bench.sweeper.sweep(hearing=False)
    assert (await entry(bench, "branch")).state == "rows"
    assert await bench.balanced() == {"acme": 140}
    await bench.withdraw("long")
    await bench.freed("long")
    assert await bench.balanced() == {"acme": 0}


async def test_the_branch_outlives_what_it_was_cut_from(bench: Bench, tenant: str) -> None:
    await bench.publish(tenant, "branch", **SPLIT)
    await bench.withdraw("long")
    await bench.freed("long")
    assert await bench.balanced() == {"acme": 90}
    assert (await bench.lookup(tenant, "branch", "long")).entry.key == key("branch")


async def test_only_the_state_needs_room(bench: Bench, tenant: str) -> None:
    await bench.publish(tenant, "filler", state_bytes=100, kv_bytes=0)
    assert await bench.balanced() == {"acme": 240}
    assert (await bench.reserve(tenant, "branch", **SPLIT)).decision == "granted"
    assert await bench.balanced() == {"acme": 300}


@pytest.mark.parametrize(
    "changes",
    [
        {"splits": key("unknown")},
        {"worker_id": "w2"},
        {"position": 256},
        {"kv_bytes": 81},
        {"salt": "other"},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_what_does_not_lie_so_is_refused(bench: Bench, tenant: str, changes: dict[str, Any]) -> None:
    reply = await bench.reserve(tenant, "branch", **{**SPLIT, **changes})
    assert reply.failure is not None
    assert reply.failure.code == "parent_gone"
    assert await bench.balanced() == {"acme": 140}
