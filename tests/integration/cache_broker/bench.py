"""What tests of the broker share: a migrated database with handlers on it, and calls with sensible fields."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from sqlalchemy import text

from services.cache_broker import admin
from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database
from services.cache_broker.handlers import Handlers
from services.cache_broker.hearing import Hearing
from services.cache_broker.sweeper import Sweeper
from shared.clock import ManualClock
from shared.protocol import chain
from shared.protocol.messages import (
    Abort,
    Commit,
    Freed,
    Lease,
    Lookup,
    NamespaceParts,
    Reserve,
    ReserveReply,
    Withdraw,
)

FINGERPRINT = "f" * 64


def key(name: str) -> bytes:
    """A chain key for a name."""
    return hashlib.sha256(name.encode()).digest()


def namespace(tenant: str, salt: str = "") -> NamespaceParts:
    return NamespaceParts(fingerprint=FINGERPRINT, adapter_digest="", tenant=tenant, salt=salt)


@dataclass
class Bench:
    """A broker without a queue, and a worker's calls to it."""

    url: str
    database: Database
    clock: ManualClock
    handlers: Handlers
    sweeper: Sweeper
    hearing: Hearing
    registry: CollectorRegistry
    settings: BrokerSettings
    worker: str = "w1"
    epoch: str = "e1"
    tenants: dict[str, str] = field(default_factory=dict)

    async def tenant(self, name: str = "acme", cache_bytes: int = 1000) -> str:
        """A new tenant; its id."""
        now = self.clock.now()
        self.tenants[name] = await self.database.run(
            lambda c: admin.create_tenant(c, name, now=now, cache_bytes=cache_bytes)
        )
        return self.tenants[name]

    async def reserve(self, tenant: str, name: str, **changes: Any) -> ReserveReply:
        """Ask for room for the entry called `name`: by default 60 bytes of state, 40 of rows, at position 64."""
        space = namespace(tenant, changes.pop("salt", ""))
        fields: dict[str, Any] = {
            "request_id": f"r-{name}",
            "worker_id": self.worker,
            "epoch": self.epoch,
            "namespace": space,
            "root": chain.root(space),
            "key": key(name),
            "parent": None,
            "splits": None,
            "layout_version": chain.LAYOUT_VERSION,
            "position": 64,
            "parent_position": 0,
            "state_bytes": 60,
            "kv_bytes": 40,
        }
        reply = await self.handlers.answer(Reserve(**{**fields, **changes}))
        assert isinstance(reply, ReserveReply)
        return reply

    async def commit(self, reservation: str | None) -> Any:
        assert reservation is not None
        return await self.handlers.answer(
            Commit(reservation_id=reservation, worker_id=self.worker, epoch=self.epoch, digest="")
        )

    async def abort(self, reservation: str | None) -> Any:
        assert reservation is not None
        return await self.handlers.answer(Abort(reservation_id=reservation, worker_id=self.worker))

    async def publish(self, tenant: str, name: str, **changes: Any) -> bytes:
        """Reserve and commit; the key."""
        reply = await self.reserve(tenant, name, **changes)
        assert reply.decision == "granted", reply
        assert (await self.commit(reply.reservation_id)).failure is None
        return key(name)

    async def lookup(self, tenant: str, *names: str, salt: str = "") -> Any:
        space = namespace(tenant, salt)
        return await self.handlers.answer(
            Lookup(
                namespace=space,
                root=chain.root(space),
                chain=tuple(map(key, names)),
                layout_version=chain.LAYOUT_VERSION,
            )
        )

    async def lease(self, tenant: str, name: str, **changes: Any) -> Any:
        space = namespace(tenant, changes.pop("salt", ""))
        fields: dict[str, Any] = {
            "request_id": "reader",
            "worker_id": self.worker,
            "epoch": self.epoch,
            "namespace": space,
            "root": chain.root(space),
            "key": key(name),
            "layout_version": chain.LAYOUT_VERSION,
            "ttl_s": 30,
        }
        return await self.handlers.answer(Lease(**{**fields, **changes}))

    async def withdraw(self, *names: str) -> Any:
        return await self.handlers.answer(
            Withdraw(worker_id=self.worker, epoch=self.epoch, keys=tuple(map(key, names)))
        )

    async def freed(self, *names: str) -> Any:
        return await self.handlers.answer(
            Freed(worker_id=self.worker, epoch=self.epoch, keys=tuple(map(key, names)))
        )

    async def rows(self, statement: str) -> list[Any]:
        """The rows of a query, for looking behind the scenes."""
        return await self.database.run(_query(statement))

    async def balanced(self) -> dict[str, int]:
        """Assert the ledger's equation for every tenant (C5); used bytes by tenant name."""
        found = await self.rows(
            """
            SELECT t.name, q.used_bytes,
                   (SELECT coalesce(sum(bytes), 0) FROM ledger WHERE tenant = t.id) AS ledger,
                   (SELECT coalesce(sum(state_bytes + kv_bytes), 0) FROM entries WHERE tenant = t.id) AS entries
            FROM tenants t JOIN quotas q ON q.tenant = t.id
            """
        )
        for row in found:
            assert row.used_bytes == row.ledger == row.entries, row
        return {row.name: int(row.used_bytes) for row in found}


def _query(statement: str) -> Any:
    async def query(connection: Any) -> list[Any]:
        return list(await connection.execute(text(statement)))

    return query


@asynccontextmanager
async def bench_on(url: str, **settings: Any) -> AsyncIterator[Bench]:
    """A bench on a database with this build's tables."""
    chosen = BrokerSettings(
        statement_timeout_ms=20_000, lock_timeout_ms=20_000, pool_timeout_s=30, call_timeout_s=60, **settings
    )
    database = Database(url, chosen)
    clock = ManualClock()
    registry = CollectorRegistry()
    hearing = Hearing(chosen, clock)
    try:
        yield Bench(
            url=url,
            database=database,
            clock=clock,
            handlers=Handlers(database, chosen, clock, registry, hearing),
            sweeper=Sweeper(database, chosen, clock, registry, hearing),
            hearing=hearing,
            registry=registry,
            settings=chosen,
        )
    finally:
        await database.close()
