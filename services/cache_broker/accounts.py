"""A tenant's bytes: the limit, the counter beside it, and the ledger. Every change of the three happens here.

The row of `quotas` is also the tenant's lock. Whatever changes entries of a tenant locks it first, several tenants in
the order of their ids, and entries after it: so nothing deadlocks, and one tenant's cache changes are in one line.
Lookups and leases do not take it; they lock one entry alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker.models import LedgerKind, LedgerRow, Quota, Tenant


@dataclass(frozen=True, kw_only=True)
class Account:
    """A tenant's limit and what of it is taken, in bytes."""

    cache_bytes: int
    used_bytes: int


async def lock(connection: AsyncConnection, tenant: str) -> Account | None:
    """Lock a tenant's account until the end of the transaction; None if there is no such tenant or it is disabled."""
    statement = (
        select(Quota.cache_bytes, Quota.used_bytes)
        .join(Tenant, Tenant.id == Quota.tenant)
        .where(Quota.tenant == tenant, Tenant.disabled.is_(None))
        .with_for_update(of=Quota)
    )
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None else Account(cache_bytes=row.cache_bytes, used_bytes=row.used_bytes)


async def lock_all(connection: AsyncConnection, tenants: Iterable[str]) -> None:
    """Lock several accounts (disabled ones too), always in the same order."""
    statement = (
        select(Quota.tenant)
        .where(Quota.tenant.in_(sorted(set(tenants))))
        .order_by(Quota.tenant)
        .with_for_update()
    )
    await connection.execute(statement)


async def take(connection: AsyncConnection, tenant: str, size: int) -> bool:
    """Take `size` bytes if they fit under the limit: check and change are one statement (FR-88)."""
    statement = (
        update(Quota)
        .where(Quota.tenant == tenant, Quota.used_bytes + size <= Quota.cache_bytes)
        .values(used_bytes=Quota.used_bytes + size)
    )
    return (await connection.execute(statement)).rowcount == 1


async def give_back(
    connection: AsyncConnection, tenant: str, entry: int, size: int, kind: LedgerKind, now: datetime
) -> None:
    """Return `size` bytes of an entry, and say so in the ledger."""
    await connection.execute(
        update(Quota).where(Quota.tenant == tenant).values(used_bytes=Quota.used_bytes - size)
    )
    await note(connection, tenant, entry, -size, kind, now)


async def note(
    connection: AsyncConnection, tenant: str, entry: int, size: int, kind: LedgerKind, now: datetime
) -> None:
    """One ledger row; `size` is signed. The caller has changed the counter by the same."""
    await connection.execute(
        insert(LedgerRow).values(tenant=tenant, entry=entry, kind=kind, bytes=size, at=now)
    )
