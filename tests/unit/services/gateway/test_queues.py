"""Bounded queues: refused at the edge with the limit's name and a time to come back, counted, and open again after."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.queues import Queues
from shared.errors import Overloaded, QuotaExceeded
from shared.protocol import subjects
from shared.transport.memory import MemoryServer, MemoryTransport
from tests.unit.services.gateway.line import FINGERPRINT, OTHER_KEY, Line, Work, running_line

OTHER = {"authorization": f"Bearer {OTHER_KEY}"}


async def _held(work: Work) -> None:
    await work.cancelled.wait()


async def _refusals(line: Line) -> str:
    return (await line.client.get("/metrics")).text


async def test_a_tenants_full_queue_is_a_429_and_leaves_room_for_others() -> None:
    async with running_line(max_queued_per_tenant=1, queue_look_s=60) as line:
        line.worker.script = _held
        first = asyncio.create_task(line.chat())
        await line.work()
        second = await line.chat()
        assert (second.status_code, second.json()["error"]["code"]) == (429, "tenant_queue_full")
        assert second.json()["error"]["type"] == "rate_limit_error"
        assert "1 requests" in second.json()["error"]["message"]
        assert int(second.headers["retry-after"]) >= 1
        line.worker.script = _answer
        body = {"model": "pocket", "prompt": "Hi"}
        assert (await line.client.post("/v1/completions", json=body, headers=OTHER)).status_code == 200
        assert 'burstline_gateway_refused_total{limit="tenant_queue_full"} 1.0' in await _refusals(line)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_a_models_full_queue_is_a_503_until_a_look_finds_room() -> None:
    async with running_line(max_queued_per_model=2, queue_look_s=60) as line:
        assert (await line.chat()).status_code == 200
        assert (await line.chat()).status_code == 200
        third = await line.chat()
        assert (third.status_code, third.json()["error"]["code"]) == (503, "queue_full")
        assert third.headers["retry-after"] == "5"
        await line.gateway.queues.look()
        assert (await line.chat()).status_code == 200
        assert 'burstline_gateway_refused_total{limit="queue_full"} 1.0' in await _refusals(line)


async def test_several_prompts_are_let_in_together_or_not_at_all() -> None:
    async with running_line(max_queued_per_model=2, queue_look_s=60) as line:
        assert (await line.complete(prompt=["a", "b", "c"])).status_code == 503
        assert line.worker.works == []
        assert (await line.complete(prompt=["a", "b"])).status_code == 200


async def test_one_tenant_does_not_take_all_of_a_gateway() -> None:
    async with running_line(max_in_flight=2, max_in_flight_per_tenant=1) as line:
        line.worker.script = _held
        first = asyncio.create_task(line.chat())
        await line.work()
        second = await line.chat()
        assert (second.status_code, second.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")
        assert "retry-after" in second.headers
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_what_the_stream_holds_counts_and_an_unreachable_one_refuses_nothing() -> None:
    server = MemoryServer()
    transport = MemoryTransport(server)
    await transport.ensure_stream(subjects.REQUESTS)
    for tenant in ("a", "a", "b"):
        await transport.append(subjects.request_shared(FINGERPRINT, "low", tenant), b"x")
    queues = Queues(transport, per_model=4, per_tenant=2, look_s=60)
    await queues.look()
    with pytest.raises(QuotaExceeded):
        queues.admit(FINGERPRINT, "a")
    queues.admit(FINGERPRINT, "b")
    queues.added(subjects.request_to(FINGERPRINT, "w", "other"))
    with pytest.raises(Overloaded, match="4 requests"):
        queues.admit(FINGERPRINT, "b")
    queues.admit("e" * 64, "a")
    server.online = False
    await queues.look()
    queues.admit(FINGERPRINT, "a")


async def _answer(work: Work) -> None:
    await work.start()
    await work.end()
