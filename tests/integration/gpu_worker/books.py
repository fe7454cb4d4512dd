"""A worker's tests with the real broker: its books, one request of a tenant, and what must balance (C5)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from services.cache_broker import admin
from services.cache_broker.app import serving
from services.cache_broker.audit import Report, audit
from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database
from shared import telemetry
from shared.clock import SYSTEM
from shared.protocol.messages import CachePlan, NamespaceParts, Terminal
from tests.integration.gpu_worker.process import Client

SYSTEM_PROMPT = tuple(3 + (11 * position) % 480 for position in range(140))


@dataclass
class Broker:
    """A broker that serves, and what a test asks of its books."""

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
async def broker(url: str, client: Client, **settings: float) -> AsyncIterator[Broker]:
    """The real broker on a fresh database, in this process."""
    chosen = BrokerSettings(**settings)  # type: ignore[arg-type]
    database = Database(url, chosen)
    try:
        async with serving(client.transport, database, telemetry.build("broker", None), chosen):
            yield Broker(database, client)
    finally:
        await database.close()


async def turn(
    client: Client, name: str, tenant: str, prompt: tuple[int, ...], plan: CachePlan | None = None
) -> tuple[tuple[int, ...], Terminal]:
    """One request of a tenant: its tokens and how it ended."""
    space = NamespaceParts(fingerprint=client.fingerprint, adapter_digest="", tenant=tenant, salt="")
    request = client.request(name, prompt, tenant=tenant, namespace=space, max_tokens=24)
    await client.enqueue(request if plan is None else msgspec.structs.replace(request, cache=plan))
    state, terminal = await client.ended(name)
    return state.tokens[0], terminal


def balanced(report: Report) -> None:
    """Assert that the books agree with each other and with what every worker holds (C5)."""
    assert report.differences == ()
    assert report.silent == ()
    assert report.books
    for books in report.books:
        assert books.balanced
        assert books.counter_bytes <= books.quota_bytes
        assert books.expired_leases == books.expired_reservations == 0
