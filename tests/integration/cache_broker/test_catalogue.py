"""Reserve, commit, abort and what they do to a tenant's bytes."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry

from services.cache_broker.database import Database
from services.cache_broker.handlers import Handlers
from shared.protocol import chain
from tests.integration.cache_broker.bench import Bench, key, namespace


async def test_an_entry_is_charged_from_reserve_on_and_found_after_commit(bench: Bench) -> None:
    tenant = await bench.tenant()
    reply = await bench.reserve(tenant, "a")
    assert reply.decision == "granted", reply
    assert await bench.balanced() == {"acme": 100}
    assert (await bench.lookup(tenant, "a")).entry is None
    assert (await bench.commit(reply.reservation_id)).failure is None
    entry = (await bench.lookup(tenant, "a")).entry
    assert (entry.key, entry.position, entry.workers) == (key("a"), 64, ("w1",))
    assert await bench.balanced() == {"acme": 100}


async def test_lookup_finds_the_longest(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    await bench.publish(tenant, "b", parent=key("a"), parent_position=64, position=256)
    assert (await bench.lookup(tenant, "a", "b", "c")).entry.position == 256
    assert (await bench.lookup(tenant, "a", "other")).entry.position == 64
    assert (await bench.lookup(tenant, "other")).entry is None


@pytest.mark.parametrize("after_commit", [False, True])
async def test_abort_refunds_once(bench: Bench, after_commit: bool) -> None:
    tenant = await bench.tenant()
    reply = await bench.reserve(tenant, "a")
    if after_commit:
        await bench.commit(reply.reservation_id)
    for _ in range(2):
        assert (await bench.abort(reply.reservation_id)).failure is None
        assert await bench.balanced() == {"acme": 0}
    assert (await bench.commit(reply.reservation_id)).failure.code == "reservation_gone"
    assert (await bench.lookup(tenant, "a")).entry is None


async def test_fr_88_fifty_at_once_against_room_for_one(bench: Bench) -> None:
    """Three brokers, fifty reservations, room for one: one is granted, nothing else is charged."""
    tenant = await bench.tenant(cache_bytes=100)
    others = [Database(bench.url, bench.settings) for _ in range(2)]
    brokers = [
        bench.handlers,
        *(
            Handlers(other, bench.settings, bench.clock, CollectorRegistry(), bench.hearing)
            for other in others
        ),
    ]

    async def ask(number: int) -> str:
        asker = Bench(**{**bench.__dict__, "handlers": brokers[number % 3]})
        return (await asker.reserve(tenant, f"e{number}")).decision

    answers = await asyncio.gather(*(ask(number) for number in range(50)))
    assert answers.count("granted") == 1
    assert set(answers) == {"granted", "skips_pinned"}
    assert await bench.balanced() == {"acme": 100}
    for other in others:
        await other.close()


async def test_first_publisher_wins(bench: Bench) -> None:
    tenant = await bench.tenant()
    answers = await asyncio.gather(
        *(bench.reserve(tenant, "a", request_id=f"r{number}", worker_id=f"w{number}") for number in range(8))
    )
    assert sorted(answer.decision for answer in answers) == ["exists"] * 7 + ["granted"]
    assert await bench.balanced() == {"acme": 100}


async def test_a_repeated_reserve_is_the_same_reservation(bench: Bench) -> None:
    """A worker whose answer was lost asks again."""
    tenant = await bench.tenant()
    first = await bench.reserve(tenant, "a")
    assert await bench.reserve(tenant, "a") == first
    assert await bench.balanced() == {"acme": 100}


async def test_larger_than_the_quota_skips_budget(bench: Bench) -> None:
    tenant = await bench.tenant(cache_bytes=99)
    assert (await bench.reserve(tenant, "a")).decision == "skips_budget"
    assert await bench.balanced() == {"acme": 0}


async def test_fr_91_ten_kept_of_fifteen_and_every_answer_counted(bench: Bench) -> None:
    """Room for 10, 15 published: the oldest go, the publisher is told which, the counters say how often."""
    tenant = await bench.tenant(cache_bytes=1000)
    for number in range(15):
        bench.clock.advance(0.1)
        reply = await bench.reserve(tenant, f"e{number}")
        if reply.decision == "evict":
            assert reply.evict == (key(f"e{number - 10}"),)
            assert (await bench.withdraw(f"e{number - 10}")).refused == ()
            await bench.freed(f"e{number - 10}")
            reply = await bench.reserve(tenant, f"e{number}")
        await bench.commit(reply.reservation_id)
        await bench.balanced()
    kept = [n for n in range(15) if (await bench.lookup(tenant, f"e{n}")).entry is not None]
    assert kept == list(range(5, 15))
    assert bench.registry.get_sample_value("burstline_broker_reserve_total", {"decision": "granted"}) == 15
    assert bench.registry.get_sample_value("burstline_broker_reserve_total", {"decision": "evict"}) == 5


async def test_no_room_beside_leased_bytes_skips_pinned(bench: Bench) -> None:
    tenant = await bench.tenant(cache_bytes=100)
    await bench.publish(tenant, "a")
    lease = await bench.lease(tenant, "a")
    assert (await bench.reserve(tenant, "b")).decision == "skips_pinned"
    bench.clock.advance(31)
    assert (await bench.reserve(tenant, "b")).evict == (key("a"),)
    assert lease.reason == "granted"


async def test_a_parent_with_children_keeps_its_rows_and_goes_with_the_last(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "p")
    await bench.publish(tenant, "c1", parent=key("p"), parent_position=64, position=128)
    await bench.publish(tenant, "c2", parent=key("p"), parent_position=64, position=192)
    await bench.withdraw("p")
    await bench.freed("p")
    assert await bench.balanced() == {"acme": 240}
    assert (await bench.lookup(tenant, "p")).entry is None
    assert (await bench.lookup(tenant, "p", "c1")).entry.key == key("c1")
    assert (await bench.lease(tenant, "p")).reason == "gone"
    for name, left in (("c1", 140), ("c2", 0)):
        await bench.withdraw(name)
        await bench.freed(name)
        assert await bench.balanced() == {"acme": left}


async def test_rows_that_stayed_get_a_state_again(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "p")
    await bench.publish(tenant, "c", parent=key("p"), parent_position=64, position=128)
    await bench.withdraw("p")
    await bench.freed("p")
    again = await bench.reserve(tenant, "p", request_id="later", state_bytes=50)
    assert again.decision == "granted"
    assert await bench.balanced() == {"acme": 190}
    await bench.abort(again.reservation_id)
    assert await bench.balanced() == {"acme": 140}
    await bench.publish(tenant, "p", request_id="third")
    assert (await bench.lookup(tenant, "p")).entry.key == key("p")
    assert await bench.balanced() == {"acme": 200}


async def test_a_parent_that_is_not_held_here_is_refused(bench: Bench) -> None:
    """Its rows would be charged to nobody."""
    tenant = await bench.tenant()
    await bench.publish(tenant, "p")
    child = {"parent": key("p"), "parent_position": 64, "position": 128}
    for changes in ({"parent": key("x")}, {"parent_position": 0}, {"worker_id": "w2"}):
        reply = await bench.reserve(tenant, "c", **{**child, **changes})
        assert reply.failure is not None
        assert reply.failure.code == "parent_gone"
    assert await bench.balanced() == {"acme": 100}


async def test_an_expired_reservation_is_refunded_and_cannot_be_committed(bench: Bench) -> None:
    tenant = await bench.tenant()
    reply = await bench.reserve(tenant, "a")
    bench.clock.advance(bench.settings.reservation_ttl_s - 1)
    await bench.sweeper.sweep(hearing=True)
    assert await bench.balanced() == {"acme": 100}
    bench.clock.advance(1)
    await bench.sweeper.sweep(hearing=True)
    assert await bench.balanced() == {"acme": 0}
    assert (await bench.commit(reply.reservation_id)).failure.code == "reservation_gone"


async def test_fr_92_bytes_of_all_namespaces_count_together(bench: Bench) -> None:
    """Entries of 10 and of 200 bytes under two salts: the limit is the sum, and room is made among all of them."""
    tenant = await bench.tenant(cache_bytes=210)
    await bench.publish(tenant, "small", state_bytes=10, kv_bytes=0)
    bench.clock.advance(1)
    await bench.publish(tenant, "large", state_bytes=200, kv_bytes=0, salt="s")
    assert await bench.balanced() == {"acme": 210}
    reply = await bench.reserve(tenant, "next", state_bytes=11, kv_bytes=0, salt="s")
    assert reply.evict == (key("small"), key("large"))


async def test_a_layout_version_is_part_of_the_identity(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    other = await bench.reserve(tenant, "a", layout_version=chain.LAYOUT_VERSION + 1, request_id="r2")
    assert other.decision == "granted"


async def test_fr_83_and_fr_84_tenants_and_salts_stay_apart(bench: Bench) -> None:
    """Same prompt, same salt, another tenant: nothing; and a root that is not the namespace's is refused."""
    one, two = await bench.tenant("one"), await bench.tenant("two")
    await bench.publish(one, "a", salt="victim")
    assert (await bench.lookup(one, "a", salt="victim")).entry is not None
    assert (await bench.lookup(one, "a")).entry is None
    assert (await bench.lookup(two, "a", salt="victim")).entry is None
    stolen = chain.root(namespace(one, "victim"))
    for reply in (
        await bench.reserve(two, "b", root=stolen),
        await bench.reserve("t_nobody", "b"),
    ):
        assert reply.failure is not None
        assert reply.failure.code == "wrong_namespace"
    assert (await bench.lease(two, "a", root=stolen)).reason == "wrong_namespace"
    assert await bench.balanced() == {"one": 100, "two": 0}


@pytest.mark.parametrize(
    "changes",
    [
        {"key": b"short"},
        {"parent": b""},
        {"state_bytes": -1},
        {"kv_bytes": 1 << 60},
        {"position": 0},
        {"position": 1 << 31},
        {"parent_position": -64},
        {"parent": key("a"), "parent_position": 32},
    ],
    ids=str,
)
async def test_bad_fields_are_refused_by_name(bench: Bench, changes: dict[str, object]) -> None:
    tenant = await bench.tenant()
    reply = await bench.reserve(tenant, "a", **changes)
    assert reply.failure is not None
    assert reply.failure.code == "invalid_request"
    assert await bench.balanced() == {"acme": 0}


async def test_silent_workers_are_hidden_then_reaped(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    bench.clock.advance(bench.settings.alive_after_s + 1)
    assert (await bench.lookup(tenant, "a")).entry is None
    assert await bench.balanced() == {"acme": 100}
    for _ in range(14):
        bench.clock.advance(5)
        await bench.sweeper.sweep(hearing=True)
    assert await bench.balanced() == {"acme": 0}
    assert (await bench.reserve(tenant, "b")).failure.code == "epoch_gone"  # type: ignore[union-attr]


@pytest.mark.parametrize("reason", ["outage", "pause"])
async def test_nobody_is_reaped_while_the_broker_could_not_hear(bench: Bench, reason: str) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    if reason == "outage":
        for _ in range(30):
            bench.clock.advance(5)
            await bench.sweeper.sweep(hearing=False)
    else:
        bench.clock.advance(3600)
        await bench.sweeper.sweep(hearing=True)
    assert await bench.balanced() == {"acme": 100}
    assert timedelta(seconds=bench.settings.reap_after_s) < timedelta(seconds=150)
