"""A capture in the middle of an entry's rows: rows pass over, and no byte comes or goes."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from sqlalchemy import text

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


async def test_a_split_that_ran_out_is_undone_when_it_is_asked_for_again_and_given_up(
    bench: Bench, tenant: str
) -> None:
    """What a worker does whose answer was lost: in its tree nothing was split."""
    await bench.reserve(tenant, "branch", **SPLIT)
    bench.clock.advance(bench.settings.reservation_ttl_s)
    await bench.sweeper.sweep(hearing=False)
    reply = await bench.reserve(tenant, "branch", **{**SPLIT, "state_bytes": 0})
    assert await bench.balanced() == {"acme": 140}
    await bench.abort(reply.reservation_id)
    long = await entry(bench, "long")
    assert (long.parent, long.parent_position, long.kv_bytes) == (None, 0, 80)
    assert await entry(bench, "branch") is None
    assert await bench.balanced() == {"acme": 140}


async def test_rows_whose_state_comes_back_stay_when_it_does_not(bench: Bench, tenant: str) -> None:
    await bench.publish(tenant, "branch", **SPLIT)
    await bench.withdraw("branch")
    await bench.freed("branch")
    reply = await bench.reserve(tenant, "branch", position=128, kv_bytes=0)
    await bench.abort(reply.reservation_id)
    long, branch = await entry(bench, "long"), await entry(bench, "branch")
    assert (branch.state, branch.kv_bytes) == ("rows", 30)
    assert (long.parent, long.kv_bytes) == (key("branch"), 50)
    assert await bench.balanced() == {"acme": 140}


async def test_an_entry_is_split_again_and_again_and_goes_in_any_order(bench: Bench, tenant: str) -> None:
    """Branch points at 192, 64 and 128, in this order; each takes its rows from the entry above it."""
    above = [("b192", "long", 192, None, 60), ("b64", "b192", 64, None, 20), ("b128", "b192", 128, "b64", 20)]
    for names in permutations(("long", "b192", "b64", "b128")):
        for name, heir, position, parent, rows in above:
            await bench.publish(
                tenant, name, splits=key(heir), position=position, state_bytes=10, kv_bytes=rows,
                parent=parent and key(parent), parent_position=64 if parent else 0,
            )  # fmt: skip
        assert await bench.balanced() == {"acme": 170}
        found = [await entry(bench, name) for name in ("b64", "b128", "b192", "long")]
        assert [one.kv_bytes for one in found] == [20, 20, 20, 20]
        assert [one.parent for one in found] == [None, key("b64"), key("b128"), key("b192")]
        for name in names:
            await bench.withdraw(name)
            await bench.freed(name)
            await bench.balanced()
        assert await bench.balanced() == {"acme": 0}
        await bench.publish(tenant, "long", position=256, kv_bytes=80)


async def test_room_is_not_made_of_what_is_split(bench: Bench, tenant: str) -> None:
    await bench.publish(tenant, "filler", position=64, state_bytes=120, kv_bytes=0)
    bench.clock.advance(1)
    await bench.lease(tenant, "filler")
    reply = await bench.reserve(tenant, "branch", **SPLIT)
    assert (reply.decision, reply.evict) == ("skips_pinned", ())
    bench.clock.advance(31)
    reply = await bench.reserve(tenant, "branch", **SPLIT)
    assert (reply.decision, reply.evict) == ("evict", (key("filler"),))


async def test_what_needs_no_room_is_granted_above_the_quota(bench: Bench, tenant: str) -> None:
    """An operator lowered it; a split of no state is how a worker takes a lost one back."""
    await bench.database.run(lambda c: c.execute(text("UPDATE quotas SET cache_bytes = 100")))
    assert (await bench.reserve(tenant, "branch", **SPLIT)).decision == "skips_pinned"
    assert (await bench.reserve(tenant, "branch", **{**SPLIT, "state_bytes": 0})).decision == "granted"
    assert await bench.balanced() == {"acme": 140}


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
