"""What expires: leases, keys, reservations, silent workers, old history. Every broker sweeps; row locks keep them apart.

After a start, an outage of NATS or Postgres, or a pause of the whole machine nobody is reaped until the broker has
listened for the full `reap_after_s` again (`hearing`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from datetime import datetime, timedelta
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from sqlalchemy import delete, exists, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker import catalogue, idempotency, presence
from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database, Work
from services.cache_broker.hearing import Hearing
from services.cache_broker.models import Entry, LeaseRow, LedgerRow, Replica
from shared.clock import Clock
from shared.errors import BurstlineError
from shared.outage import Outage
from shared.transport.base import Transport

BATCH: Final = 256
"""Rows in one transaction, so that a sweep holds no account for long."""

_log = logging.getLogger(__name__)


class Sweeper:
    """Periodic work of one broker process."""

    def __init__(
        self,
        database: Database,
        settings: BrokerSettings,
        clock: Clock,
        registry: CollectorRegistry,
        hearing: Hearing,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._hearing = hearing
        self._swept = Counter("burstline_broker_swept", "What expired", ["what"], registry=registry)

    async def run(self, transport: Transport) -> None:
        """Until cancelled; an outage of the database is waited out."""
        outage = Outage(_log, "sweeps")
        while True:
            await asyncio.sleep(self._settings.sweep_interval_s)
            try:
                await self.sweep(hearing=await transport.ready())
                outage.worked()
            except BurstlineError as error:
                self._hearing.tick(heard=False)  # heartbeats could not be noted either
                outage.failed(error.message)

    async def sweep(self, *, hearing: bool) -> None:
        """One round. `hearing` = heartbeats could come in since the last round."""
        now = self._clock.now()
        self._hearing.tick(heard=hearing)
        await self._count("leases", self._database.run(lambda c: _expire_leases(c, now)))
        await self._count("keys", self._database.run(lambda c: idempotency.expire(c, now)))
        await self._count("reservations", self._expire_reservations(now))
        silence = timedelta(seconds=self._settings.reap_after_s)
        since = self._hearing.silent_since(silence)
        if since is not None:
            for worker in await self._database.run(lambda c: presence.reap(c, silent_since=since, now=now)):
                _log.warning("worker %s is silent for %s: its entries are gone", worker, silence)
        await self.drop_orphans()
        old = now - timedelta(seconds=self._settings.ledger_retention_s)
        await self._count("workers", self._database.run(lambda c: presence.forget(c, reaped_before=old)))
        await self._count("ledger rows", self._database.run(lambda c: _forget_history(c, old)))

    async def drop_orphans(self) -> None:
        """Entries of epochs that are over, a tenant at a time."""
        now = self._clock.now()
        for tenant in await self._database.run(presence.orphaned_tenants):
            await self._count("entries", self._database.run(_dropper(tenant, now)))

    async def _expire_reservations(self, now: datetime) -> int:
        expired = await self._database.run(lambda c: _expired_reservations(c, now))
        for reservation, worker in expired:
            await self._database.run(_expirer(reservation, worker, now))
        return len(expired)

    async def _count(self, what: str, work: Awaitable[int]) -> None:
        self._swept.labels(what).inc(await work)


def _dropper(tenant: str, now: datetime) -> Work[int]:
    return lambda connection: presence.drop_orphans(connection, tenant, now=now)


def _expirer(reservation: str, worker: str, now: datetime) -> Work[None]:
    async def expire(connection: AsyncConnection) -> None:
        entry = await catalogue.by_reservation(connection, reservation, worker, None)
        if entry is not None and entry.state == "reserved":  # else it was committed or aborted meanwhile
            await catalogue.drop(connection, entry, "refund", now)

    return expire


async def _expire_leases(connection: AsyncConnection, now: datetime) -> int:
    statement = delete(LeaseRow).where(LeaseRow.expires <= now).returning(LeaseRow.id)
    return len((await connection.execute(statement)).all())


async def _expired_reservations(connection: AsyncConnection, now: datetime) -> list[tuple[str, str]]:
    statement = (
        select(Entry.reservation, Replica.worker)
        .join(Replica, Replica.entry == Entry.id)
        .where(Entry.reserved_until <= now)
        .order_by(Entry.reserved_until)
        .limit(BATCH)
    )
    return [(row.reservation, row.worker) for row in await connection.execute(statement)]


async def _forget_history(connection: AsyncConnection, before: datetime) -> int:
    """Delete the ledger rows of entries that are gone for long. Together they sum to zero, so no balance changes."""
    over = (
        select(LedgerRow.entry)
        .where(~exists().where(Entry.id == LedgerRow.entry))
        .group_by(LedgerRow.entry)
        .having(func.max(LedgerRow.at) < before, func.sum(LedgerRow.bytes) == 0)
        .limit(BATCH)
    )
    statement = delete(LedgerRow).where(LedgerRow.entry.in_(over)).returning(LedgerRow.id)
    return len((await connection.execute(statement)).all())
