"""A worker and the real broker: conversations of two tenants under small quotas and small pools, then the audit (C5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from services.cache_broker import admin
from services.cache_broker.app import serving
from services.cache_broker.audit import Report, audit
from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database
from services.cache_broker.migrate import migrate
from shared import telemetry
from shared.clock import SYSTEM
from shared.protocol.messages import CachePlan, NamespaceParts, Terminal
from tests.integration.gpu_worker.process import NO_CACHE, Client, free_port, metric, worker_process

SYSTEM_PROMPT = tuple(3 + (11 * position) % 480 for position in range(140))


@dataclass
class Broker:
    database: Database
    client: Client

    async def tenant(self, name: str, cache_bytes: int) -> str:
        return await self.database.run(
            lambda connection: admin.create_tenant(
                connection, name, now=SYSTEM.now(), cache_bytes=cache_bytes
            )
        )

    async def audit(self) -> Report:
        return await audit(self.database, self.client.transport, SYSTEM)


@asynccontextmanager
async def _broker(database_url: str, client: Client) -> AsyncIterator[Broker]:
    settings = BrokerSettings()
    await migrate(database_url, settings)
    database = Database(database_url, settings)
    try:
        async with serving(client.transport, database, telemetry.build("broker", None), settings):
            yield Broker(database, client)
    finally:
        await database.close()


async def _turn(
    client: Client, name: str, tenant: str, prompt: tuple[int, ...], plan: CachePlan | None = None
) -> tuple[tuple[int, ...], Terminal]:
    space = NamespaceParts(fingerprint=client.fingerprint, adapter_digest="", tenant=tenant, salt="")
    request = client.request(name, prompt, tenant=tenant, namespace=space, max_tokens=24)
    await client.enqueue(request if plan is None else msgspec.structs.replace(request, cache=plan))
    state, terminal = await client.ended(name)
    return state.tokens[0], terminal


async def _conversation(client: Client, name: str, tenant: str, turns: int, salt: int) -> list[Terminal]:
    """Turns that each continue the last, and what each of them reused."""
    prompt, terminals = SYSTEM_PROMPT + (salt,) * 9, []
    for turn in range(turns):
        answer, terminal = await _turn(client, f"{name}-{turn}", tenant, prompt)
        cold, _ = await _turn(client, f"{name}-{turn}-cold", tenant, prompt, NO_CACHE)
        assert answer == cold
        assert terminal.failure is None
        terminals.append(terminal)
        prompt = prompt + answer + tuple(200 + (salt + turn * 17 + i) % 250 for i in range(60))
    return terminals


def _balanced(report: Report) -> None:
    assert report.differences == ()
    assert report.silent == ()
    assert report.books
    for books in report.books:
        assert books.balanced
        assert books.counter_bytes <= books.quota_bytes
        assert books.expired_leases == books.expired_reservations == 0


@pytest.mark.parametrize(
    ("quota", "blocks"),
    [(64 << 20, "128"), (450_000, "128"), (64 << 20, "9")],
    ids=["roomy", "quota", "pool"],
)
async def test_c5_the_books_are_the_bytes_after_conversations(
    quota: int,
    blocks: str,
    database_url: str,
    nats_url: str,
    client: Client,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    async with _broker(database_url, client) as broker:
        one, two = await broker.tenant("one", quota), await broker.tenant("two", quota)
        port = free_port()
        sizes = {"num_blocks": blocks, "max_context": "576", "health_port": str(port)}
        with worker_process(nats_url, tmp_path, tiny_model, "w1", **sizes):
            await client.find_worker("w1")
            first = await _conversation(client, "a", one, 4, salt=1)
            other = await _conversation(client, "b", two, 2, salt=1)
            again = await _conversation(client, "c", one, 2, salt=2)
            report = await broker.audit()
            evicted = await asyncio.to_thread(metric, port, "burstline_worker_evictions_total")
    _balanced(report)
    assert report.asked == ("w1",)
    assert first[0].cached_tokens == 0
    assert other[0].cached_tokens == 0  # C4: another tenant's same prompt
    roomy = quota > 10_000_000 and blocks == "128"
    assert (evicted == 0) == roomy
    if roomy:
        assert [turn.cached_tokens for turn in first[1:]] == [128, 192, 256]
        assert again[1].cached_tokens >= 128


async def test_c5_a_branch_point_inside_an_entry_splits_it_and_the_books_follow(
    database_url: str, nats_url: str, client: Client, tiny_model: Path, tmp_path: Path
) -> None:
    def prompt(salt: int) -> tuple[int, ...]:
        return SYSTEM_PROMPT + tuple(200 + (salt * 37 + i) % 250 for i in range(150))

    async with _broker(database_url, client) as broker:
        tenant = await broker.tenant("one", 64 << 20)
        with worker_process(nats_url, tmp_path, tiny_model, "w1"):
            await client.find_worker("w1")
            deep = await _turn(client, "deep", tenant, prompt(1))
            branch = await _turn(client, "branch", tenant, prompt(2))
            _balanced(await broker.audit())
            shared, third = await _turn(client, "third", tenant, prompt(3))
            cold, _ = await _turn(client, "cold", tenant, prompt(3), NO_CACHE)
            _, again = await _turn(client, "again", tenant, (*prompt(1), 5))
            report = await broker.audit()
    _balanced(report)
    assert (deep[1].cached_tokens, branch[1].cached_tokens) == (0, 0)
    assert third.cached_tokens == 128  # the system prompt, cut at the branch of the first two
    assert shared == cold
    assert again.cached_tokens == 256
    (books,) = report.books
    assert books.entries == 4
