"""Which request a key stands for, on a real Postgres."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from services.cache_broker import idempotency
from services.cache_broker.config import BrokerSettings
from shared.protocol.messages import Failure, Find, Forget, Recall, Remember, Remembered, Terminal
from tests.golden.protocol.examples import example
from tests.integration.cache_broker.bench import Bench


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def remember(bench: Bench, request: str, *, tenant: str = "t", body: str = "body") -> Remembered:
    call = Remember(
        tenant=tenant,
        key=digest("key"),
        body=digest(body),
        request_id=request,
        sheet=request.encode(),
        deadline_ns=bench.clock.wall_ns() + 60 * 10**9,
    )
    reply = await bench.handlers.answer(call)
    assert isinstance(reply, Remembered)
    return reply


async def recall(bench: Bench, *, body: str = "body") -> Any:
    return await bench.handlers.answer(Recall(tenant="t", key=digest("key"), body=digest(body)))


async def end(bench: Bench, request: str, **changes: Any) -> None:
    sample = example(Terminal)
    assert isinstance(sample, Terminal)
    fields = {"failure": None, "cancel_reason": None, "at_ns": bench.clock.wall_ns()} | changes
    terminal = msgspec.structs.replace(sample, request_id=request, **fields)
    window = timedelta(seconds=bench.settings.idempotency_s)
    await bench.database.run(lambda c: idempotency.ended(c, [terminal], window=window))


async def test_fr_68_one_of_two_at_once_is_new_and_the_other_is_told_so(bench: Bench) -> None:
    replies = await asyncio.gather(*(remember(bench, f"r{number}") for number in range(6)))
    (winner,) = [reply for reply in replies if reply.new]
    assert {(reply.request_id, reply.sheet) for reply in replies} == {(winner.request_id, winner.sheet)}


async def test_fr_68_another_body_is_a_conflict_and_another_tenant_is_not(bench: Bench) -> None:
    await remember(bench, "r1")
    for reply in (await remember(bench, "r2", body="other"), await recall(bench, body="other")):
        assert reply.failure is not None
        assert (reply.failure.code, reply.failure.status) == ("idempotency_key_reused", 409)
    assert (await remember(bench, "r3", tenant="u", body="other")).new


async def test_a_stream_is_found_by_its_own_tenant_alone(bench: Bench) -> None:
    await remember(bench, "r1")
    mine: Any = await bench.handlers.answer(Find(tenant="t", request_id="r1"))
    assert (mine.request_id, mine.sheet) == ("r1", b"r1")
    for call in (Find(tenant="u", request_id="r1"), Find(tenant="t", request_id="r9")):
        other: Any = await bench.handlers.answer(call)
        assert other.failure.status == 404


async def test_a_finished_request_keeps_its_key_for_the_window_and_is_swept(bench: Bench) -> None:
    await remember(bench, "r1")
    bench.clock.advance(50)
    await end(bench, "r1", cancel_reason="stop_string")
    bench.clock.advance(bench.settings.idempotency_s - 1)
    assert (await recall(bench)).request_id == "r1"
    bench.clock.advance(1)
    assert (await recall(bench)).request_id is None
    await bench.sweeper.sweep(hearing=True)
    assert await bench.rows("SELECT * FROM idempotency") == []
    assert (await remember(bench, "r2")).new


async def test_an_expired_key_is_free_before_it_is_swept(bench: Bench) -> None:
    await remember(bench, "r1")
    bench.clock.advance(60 + bench.settings.idempotency_s)
    assert (await remember(bench, "r2", body="other")).new


@pytest.mark.parametrize(
    "changes",
    [
        {"failure": Failure(code="stalled", message="m", status=500, retry_after_s=None)},
        {"cancel_reason": "client_disconnected"},
    ],
)
async def test_a_request_that_did_not_end_well_frees_its_key(bench: Bench, changes: dict[str, Any]) -> None:
    await remember(bench, "r1")
    await end(bench, "r1", **changes)
    assert (await remember(bench, "r2")).new


async def test_a_request_that_was_never_enqueued_frees_its_key(bench: Bench) -> None:
    await remember(bench, "r1")
    await bench.handlers.answer(Forget(tenant="u", request_id="r1"))
    assert (await recall(bench)).request_id == "r1"
    await bench.handlers.answer(Forget(tenant="t", request_id="r1"))
    assert (await recall(bench)).request_id is None


async def test_what_is_no_digest_or_too_large_is_refused(bench: Bench) -> None:
    call = Remember(tenant="t", key="a", body=digest("b"), request_id="r", sheet=b"", deadline_ns=0)
    large = msgspec.structs.replace(call, key=digest("a"), sheet=bytes(idempotency.MAX_SHEET_BYTES + 1))
    for faulty in (call, large):
        reply: Any = await bench.handlers.answer(faulty)
        assert reply.failure.status == 400


def test_keys_may_not_outlive_the_tokens() -> None:
    with pytest.raises(ValueError, match="journal_grace_s"):
        BrokerSettings(idempotency_s=900, journal_grace_s=900)
