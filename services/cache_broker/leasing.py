"""Leases, and the two steps in which a holder frees entries: withdraw (no lookups, no leases any more), then freed.

A lease and a withdrawal of one entry meet at the entry's row lock: whichever commits first, the other sees it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker import accounts, presence
from services.cache_broker.catalogue import COLUMNS, EntryRow, drop, held_by, key_among, leased
from services.cache_broker.models import Entry, LeaseRow, Tenant
from shared.protocol.messages import Lease, LeaseReply, Withdraw, WithdrawReply


async def lease(connection: AsyncConnection, call: Lease, *, now: datetime, ttl: timedelta) -> LeaseReply:
    """Hold an entry for a request. Asking again for the same request extends its lease."""
    statement = (
        select(Entry.id, Entry.state, held_by(call.worker_id, call.epoch).label("held_here"))
        .join(Tenant, Tenant.id == Entry.tenant)
        .where(
            Entry.root == call.root,
            Entry.key == call.key,
            Entry.layout_version == call.layout_version,
            Tenant.disabled.is_(None),
        )
        .with_for_update(of=Entry)
    )
    entry = (await connection.execute(statement)).one_or_none()
    if entry is None or entry.state in ("reserved", "rows"):
        return LeaseReply(failure=None, lease_id=None, reason="gone")
    if entry.state == "evicting":
        return LeaseReply(failure=None, lease_id=None, reason="evicting")
    if not entry.held_here:
        return LeaseReply(failure=None, lease_id=None, reason="not_held_here")
    taken = (
        insert(LeaseRow)
        .values(
            id=uuid.uuid4().hex,
            entry=entry.id,
            worker=call.worker_id,
            request=call.request_id,
            expires=now + ttl,
        )
        .on_conflict_do_update(
            index_elements=[LeaseRow.entry, LeaseRow.worker, LeaseRow.request],
            set_={"expires": now + ttl},
        )
        .returning(LeaseRow.id)
    )
    identifier = (await connection.execute(taken)).scalar_one()
    await connection.execute(update(Entry).where(Entry.id == entry.id).values(last_used=now))
    return LeaseReply(failure=None, lease_id=identifier, reason="granted")


async def release(connection: AsyncConnection, lease_id: str) -> None:
    """End a lease. Idempotent."""
    await connection.execute(delete(LeaseRow).where(LeaseRow.id == lease_id))


async def withdraw(connection: AsyncConnection, call: Withdraw, *, now: datetime) -> WithdrawReply:
    """Take a worker's entries out of sight, except those that are leased or not yet committed.

    Raises:
        Conflict: `epoch_gone`. A call without keys asks for nothing else.
    """
    await presence.check(connection, call.worker_id, call.epoch)
    entries = await _lock_held(connection, call.worker_id, call.epoch, call.keys)
    pinned = await _leased(connection, [entry.id for entry in entries], now)
    refused = {entry.key for entry in entries if entry.state == "reserved" or entry.id in pinned}
    going = [entry.id for entry in entries if entry.state == "live" and entry.key not in refused]
    await connection.execute(update(Entry).where(Entry.id.in_(going)).values(state="evicting"))
    return WithdrawReply(
        failure=None,
        withdrawn=tuple(key for key in call.keys if key not in refused),
        refused=tuple(key for key in call.keys if key in refused),
    )


async def freed(
    connection: AsyncConnection, worker: str, epoch: str, keys: Sequence[bytes], *, now: datetime
) -> None:
    """Refund withdrawn entries whose bytes are free. Keys that were not withdrawn are passed over. Idempotent."""
    entries = await _lock_held(connection, worker, epoch, keys)
    for entry in sorted(entries, key=lambda entry: entry.position, reverse=True):  # children before parents
        if entry.state == "evicting":
            await drop(connection, entry, "evict", now)


async def _lock_held(
    connection: AsyncConnection, worker: str, epoch: str, keys: Sequence[bytes]
) -> Sequence[EntryRow]:
    """The entries of `keys` that a worker holds, with their accounts locked first, then themselves."""
    mine = key_among(keys), held_by(worker, epoch)
    tenants = (await connection.execute(select(Entry.tenant).where(*mine).distinct())).scalars().all()
    await accounts.lock_all(connection, tenants)
    statement = (
        select(*COLUMNS).where(*mine, Entry.tenant.in_(tenants)).order_by(Entry.id).with_for_update(of=Entry)
    )
    return (await connection.execute(statement)).all()


async def _leased(connection: AsyncConnection, entries: Sequence[int], now: datetime) -> set[int]:
    """Which of the entries have leases; asked after their rows are locked, so that none comes after."""
    statement = select(Entry.id).where(Entry.id.in_(entries), leased(now))
    return set((await connection.execute(statement)).scalars())
