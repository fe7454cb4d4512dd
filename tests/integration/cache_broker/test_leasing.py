"""Leases against withdrawals."""

from __future__ import annotations

import asyncio

import pytest

from shared.protocol.messages import Release
from tests.integration.cache_broker.bench import Bench, key


async def test_a_lease_keeps_an_entry_until_released(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    lease = await bench.lease(tenant, "a")
    assert (await bench.withdraw("a")).refused == (key("a"),)
    for _ in range(2):
        await bench.handlers.answer(Release(lease_id=lease.lease_id))
    assert (await bench.withdraw("a")).withdrawn == (key("a"),)
    assert (await bench.lease(tenant, "a")).reason == "evicting"
    assert (await bench.lookup(tenant, "a")).entry is None


async def test_fr_77_a_lease_that_nobody_releases_ends_by_itself(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    await bench.lease(tenant, "a", ttl_s=30)
    bench.clock.advance(30)
    assert (await bench.withdraw("a")).refused == ()
    await bench.sweeper.sweep(hearing=True)
    assert await bench.rows("SELECT 1 FROM leases") == []


async def test_a_lease_is_no_longer_than_the_broker_allows(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    await bench.lease(tenant, "a", ttl_s=10**6)
    bench.clock.advance(bench.settings.max_lease_ttl_s)
    assert (await bench.withdraw("a")).refused == ()


async def test_asking_again_extends_one_lease(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    first = await bench.lease(tenant, "a", ttl_s=30)
    bench.clock.advance(20)
    assert (await bench.lease(tenant, "a", ttl_s=30)).lease_id == first.lease_id
    bench.clock.advance(20)
    assert (await bench.withdraw("a")).refused == (key("a"),)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"worker_id": "w2"}, "not_held_here"),
        ({"epoch": "e0"}, "not_held_here"),
        ({"key": key("none")}, "gone"),
        ({"salt": "other"}, "gone"),
        ({"root": b"r" * 32}, "wrong_namespace"),
    ],
)
async def test_a_lease_is_refused_with_the_reason(
    bench: Bench, changes: dict[str, object], reason: str
) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    reply = await bench.lease(tenant, "a", **changes)
    assert (reply.lease_id, reply.reason) == (None, reason)


async def test_withdrawal_and_leases_at_once_never_both_win(bench: Bench) -> None:
    tenant = await bench.tenant(cache_bytes=10_000)
    for number in range(20):
        await bench.publish(tenant, f"e{number}")

    async def race(number: int) -> None:
        lease, withdrawal = await asyncio.gather(
            bench.lease(tenant, f"e{number}"), bench.withdraw(f"e{number}")
        )
        assert (lease.reason == "granted") == (withdrawal.refused != ())

    await asyncio.gather(*(race(number) for number in range(20)))


async def test_freed_refunds_once_and_only_what_was_withdrawn(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    await bench.freed("a")
    assert await bench.balanced() == {"acme": 100}
    await bench.withdraw("a")
    for _ in range(2):
        await bench.freed("a", "unknown")
        assert await bench.balanced() == {"acme": 0}


async def test_a_key_that_the_broker_does_not_know_may_be_freed(bench: Bench) -> None:
    """The worker would else keep bytes that nobody charges."""
    assert (await bench.withdraw("unknown")).withdrawn == (key("unknown"),)


async def test_a_withdrawn_entry_can_be_published_again(bench: Bench) -> None:
    """Also when the notice that it was freed got lost; a late one then changes nothing."""
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    await bench.withdraw("a")
    await bench.publish(tenant, "a", request_id="again")
    await bench.freed("a")
    assert await bench.balanced() == {"acme": 100}
    assert (await bench.lookup(tenant, "a")).entry is not None
