"""Keys: known, unknown, remembered, and a broker that is away."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from msgspec.structs import replace

from services.gateway.auth import Authenticator
from services.gateway.config import GatewaySettings
from services.gateway.slots import Slots
from shared.clock import ManualClock
from shared.errors import QuotaExceeded, Unauthenticated
from shared.protocol.messages import Authenticate, Failure, Identity
from tests.unit.services.gateway.line import KEY, Line, Work

BEARER = f"Bearer {KEY}"


def _authenticator(line: Line, clock: ManualClock) -> Authenticator:
    settings = GatewaySettings(auth_cache_s=30, auth_negative_cache_s=3, auth_cache_entries=2)
    return Authenticator(line.gateway.broker, line.gateway.telemetry, settings, clock)


async def test_a_key_is_asked_once_and_again_when_the_memory_is_old(line: Line) -> None:
    clock = ManualClock()
    known = _authenticator(line, clock)
    for _ in range(3):
        assert (await known.identify(BEARER, None)).tenant == "acme"
    assert len(line.broker.calls) == 1
    clock.advance(31)
    await known.identify(BEARER, None)
    assert len(line.broker.calls) == 2


async def test_many_requests_with_a_new_key_ask_once(line: Line) -> None:
    known = _authenticator(line, ManualClock())
    await asyncio.gather(*(known.identify(BEARER, None) for _ in range(20)))
    assert len(line.broker.calls) == 1


async def test_a_refusal_is_remembered_for_less_long(line: Line) -> None:
    clock = ManualClock()
    known = _authenticator(line, clock)
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await known.identify("Bearer nobody", None)
    assert len(line.broker.calls) == 1
    clock.advance(4)
    with pytest.raises(Unauthenticated):
        await known.identify("Bearer nobody", None)
    assert len(line.broker.calls) == 2


async def test_the_memory_is_bounded(line: Line) -> None:
    known = _authenticator(line, ManualClock())
    for name in ("a", "b", "c"):
        with pytest.raises(Unauthenticated):
            await known.identify(f"Bearer {name}", None)
    with pytest.raises(Unauthenticated):
        await known.identify("Bearer a", None)  # forgotten, so asked again
    assert len(line.broker.calls) == 4


async def test_one_waiter_that_leaves_does_not_cancel_the_question(line: Line) -> None:
    known = _authenticator(line, ManualClock())
    first = asyncio.create_task(known.identify(BEARER, None))
    second = asyncio.create_task(known.identify(BEARER, None))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).tenant == "acme"
    assert first.cancelled()


async def test_a_broker_that_is_away_is_a_503_and_not_a_401(line: Line) -> None:
    line.broker.failure = Failure(code="unavailable", message="no database", status=503, retry_after_s=None)
    response = await line.chat()
    assert response.status_code == 503
    assert "retry-after" in response.headers
    line.broker.failure = None
    assert (await line.chat()).status_code == 200


async def test_the_key_itself_never_leaves_the_gateway(line: Line) -> None:
    await line.chat()
    calls = [call for call in line.broker.calls if isinstance(call, Authenticate)]
    assert len(calls[0].key_digest) == 64
    assert KEY not in repr(line.broker.calls)


async def test_a_key_may_be_held_to_some_models_and_to_some_requests(line: Line) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    line.broker.identities[digest] = replace(
        line.broker.identities[digest], models=("another",), max_concurrent=None
    )
    refused = await line.chat()
    assert refused.status_code == 403
    assert (await line.client.get("/v1/models")).json()["data"] == []


def test_a_limit_of_a_tenant_holds_over_all_its_keys() -> None:
    def identity(tenant: str, key_id: str) -> Identity:
        return Identity(failure=None, tenant=tenant, key_id=key_id, models=(), max_concurrent=1)

    slots = Slots(8)
    with slots.taken(identity("acme", "k1")):
        with pytest.raises(QuotaExceeded), slots.taken(identity("acme", "k2")):
            pass
        with slots.taken(identity("other", "k3")):
            assert slots.in_flight == 2
    with slots.taken(identity("acme", "k2")):
        assert slots.in_flight == 1
    assert slots.in_flight == 0


async def test_max_concurrent_of_a_tenant_is_kept(line: Line) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    line.broker.identities[digest] = replace(line.broker.identities[digest], max_concurrent=1)
    release = asyncio.Event()

    async def slow(work: Work) -> None:
        await work.start()
        await release.wait()
        await work.end()

    line.worker.script = slow
    first = asyncio.create_task(line.chat())
    await line.work()
    second = await line.chat()
    assert second.status_code == 429
    assert second.json()["error"]["code"] == "concurrency_limit_exceeded"
    release.set()
    assert (await first).status_code == 200
    assert (await line.chat()).status_code == 200
