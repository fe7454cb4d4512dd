"""Keys and tenants."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from services.cache_broker import admin
from shared.errors import BurstlineError
from shared.protocol.messages import Authenticate
from tests.integration.cache_broker.bench import Bench


async def new_key(bench: Bench, tenant: str, **changes: Any) -> admin.NewKey:
    now = bench.clock.now()
    return await bench.database.run(lambda c: admin.create_key(c, tenant, now=now, **changes))


async def authenticate(bench: Bench, key: str) -> Any:
    return await bench.handlers.answer(Authenticate(key_digest=admin.digest(key)))


async def test_a_key_stands_for_its_tenant(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.database.run(lambda c: admin.set_quota(c, "acme", cache_bytes=None, max_concurrent=3))
    made = await new_key(bench, "acme")
    who = await authenticate(bench, made.key)
    assert (who.failure, who.tenant, who.key_id, who.max_concurrent) == (None, tenant, made.id, 3)


async def test_only_the_digest_of_a_key_is_stored(bench: Bench) -> None:
    await bench.tenant()
    made = await new_key(bench, "acme", name="laptop")
    assert len(made.key) == 35
    assert made.key.startswith("bl_")
    row = (await bench.rows("SELECT * FROM api_keys"))[0]
    assert made.key not in str(row)
    assert row.digest == admin.digest(made.key)
    assert made.key.startswith(row.prefix)
    assert len(row.prefix) == 11


@pytest.mark.parametrize("fault", ["unknown", "expired", "revoked", "disabled"])
async def test_a_bad_key_is_refused_the_same_way_whatever_is_wrong(bench: Bench, fault: str) -> None:
    await bench.tenant()
    now = bench.clock.now()
    made = await new_key(bench, "acme", expires=now + timedelta(hours=1))
    key = made.key
    if fault == "unknown":
        key += "x"
    elif fault == "expired":
        bench.clock.advance(3600)
    elif fault == "revoked":
        await bench.database.run(lambda c: admin.revoke_key(c, made.id, now=now))
    else:
        await bench.database.run(lambda c: admin.disable_tenant(c, "acme", now=now))
    reply = await authenticate(bench, key)
    assert reply.failure.code == "invalid_api_key"
    assert reply.failure.status == 401
    assert (reply.tenant, reply.key_id) == ("", "")


async def test_last_used_is_written_once_a_minute(bench: Bench) -> None:
    await bench.tenant()
    made = await new_key(bench, "acme")
    seen = []
    for seconds in (0, 59, 1):
        bench.clock.advance(seconds)
        await authenticate(bench, made.key)
        seen.append((await bench.rows("SELECT last_used FROM api_keys"))[0].last_used)
    assert seen[0] == seen[1]
    assert seen[2] - seen[0] == timedelta(seconds=60)


async def test_a_disabled_tenant_neither_finds_nor_publishes(bench: Bench) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    await bench.database.run(lambda c: admin.disable_tenant(c, "acme", now=bench.clock.now()))
    assert (await bench.lookup(tenant, "a")).entry is None
    assert (await bench.lease(tenant, "a")).lease_id is None
    assert (await bench.reserve(tenant, "b")).failure.code == "wrong_namespace"  # type: ignore[union-attr]
    await bench.withdraw("a")
    await bench.freed("a")
    assert await bench.balanced() == {"acme": 0}


@pytest.mark.parametrize("name", ["", "Acme", "a b", "-a", "a" * 64, "t_1"])
async def test_a_tenants_name_is_a_plain_word(bench: Bench, name: str) -> None:
    with pytest.raises(BurstlineError) as caught:
        await bench.tenant(name)
    assert caught.value.code == "invalid_request"


async def test_a_name_is_one_tenants(bench: Bench) -> None:
    await bench.tenant()
    with pytest.raises(BurstlineError) as caught:
        await bench.tenant()
    assert caught.value.code == "conflict"


async def test_deleted_entries_are_out_of_sight_and_freed_with_the_next_need_of_room(bench: Bench) -> None:
    tenant = await bench.tenant(cache_bytes=100)
    await bench.publish(tenant, "a")
    assert await bench.database.run(lambda c: admin.withdraw_entries(c, "acme")) == 1
    assert (await bench.lookup(tenant, "a")).entry is None
    reply = await bench.reserve(tenant, "b")
    assert reply.decision == "evict"
    await bench.withdraw("a")
    await bench.freed("a")
    assert (await bench.reserve(tenant, "b")).decision == "granted"
    listed = await bench.database.run(lambda c: admin.list_entries(c, "acme", limit=10))
    assert [(entry.state, entry.workers) for entry in listed] == [("reserved", ("w1",))]
