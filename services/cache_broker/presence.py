"""Workers and their epochs. A worker's bytes die with its epoch: with the process, or with too long a silence.

A silent worker is first hidden from lookups (`alive_after`), much later reaped, or as soon as a living worker publishes
what it holds: its entries are gone and refunded, and its epoch can never come back, since it would hold bytes that
nobody charges. It begins a new one.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, exists, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker import accounts
from services.cache_broker.models import Entry, LedgerRow, Quota, Replica, Worker
from shared.errors import Conflict
from shared.protocol.messages import Heartbeat


async def note(connection: AsyncConnection, beat: Heartbeat, *, now: datetime) -> bool:
    """Take a heartbeat in. Late ones (an older epoch's last words) change nothing. True = it replaced an epoch.

    Stamps of the worker order its heartbeats; when it was seen is told by the broker's clock alone.
    """
    find = select(Worker.epoch, Worker.beat_ns).where(Worker.id == beat.worker_id).with_for_update()
    known = (await connection.execute(find)).one_or_none()
    if known is not None and known.beat_ns > beat.at_ns:
        return False
    changed = known is not None and known.epoch != beat.epoch
    values: dict[str, Any] = {
        "epoch": beat.epoch,
        "fingerprint": beat.fingerprint,
        "last_seen": now,
        "beat_ns": beat.at_ns,
    }
    if changed:
        values["reaped"] = None  # an epoch that was reaped stays so; another one begins anew
    statement = upsert(Worker).values(id=beat.worker_id, **{"reaped": None, **values})
    await connection.execute(
        statement.on_conflict_do_update(
            index_elements=[Worker.id], set_=values, where=Worker.beat_ns <= beat.at_ns
        )
    )
    return changed


async def admit(
    connection: AsyncConnection, worker: str, epoch: str, fingerprint: str, *, now: datetime
) -> None:
    """Check the epoch of a caller. One that was never seen is noted: its first heartbeat may be on its way.

    Raises:
        Conflict: `epoch_gone`, another epoch of the worker is known, or this one was reaped.
    """
    statement = upsert(Worker).values(
        id=worker, epoch=epoch, fingerprint=fingerprint, last_seen=now, beat_ns=0, reaped=None
    )
    await connection.execute(statement.on_conflict_do_nothing())
    await check(connection, worker, epoch)


async def check(connection: AsyncConnection, worker: str, epoch: str) -> None:
    """Refuse an epoch that is over. A worker that was never seen passes: it holds nothing yet.

    Raises:
        Conflict: `epoch_gone`, as for `admit`.
    """
    known = select(Worker.epoch, Worker.reaped).where(Worker.id == worker)
    row = (await connection.execute(known)).one_or_none()
    if row is not None and (row.epoch != epoch or row.reaped is not None):
        raise Conflict("this epoch of the worker is over", code="epoch_gone")


async def reap(connection: AsyncConnection, *, silent_since: datetime, now: datetime) -> list[str]:
    """Declare workers dead that were last seen before `silent_since`. Their entries go with `drop_orphans`."""
    statement = (
        update(Worker)
        .where(Worker.last_seen < silent_since, Worker.reaped.is_(None))
        .values(reaped=now)
        .returning(Worker.id)
    )
    return list((await connection.execute(statement)).scalars())


async def end_silent_holders(
    connection: AsyncConnection, entry: int, *, silent_since: datetime, now: datetime
) -> None:
    """Declare the holders of an entry dead that were last seen before `silent_since`: somebody needs their place."""
    holds = exists().where(Replica.entry == entry, Replica.worker == Worker.id, Replica.epoch == Worker.epoch)
    await connection.execute(
        update(Worker)
        .where(holds, Worker.last_seen < silent_since, Worker.reaped.is_(None))
        .values(reaped=now)
    )


async def orphaned_tenants(connection: AsyncConnection) -> list[str]:
    """Tenants with entries that no current epoch holds."""
    statement = select(Entry.tenant).where(orphan()).distinct().order_by(Entry.tenant)
    return list((await connection.execute(statement)).scalars())


async def drop_orphans(connection: AsyncConnection, tenant: str, *, now: datetime) -> int:
    """Delete a tenant's entries that no current epoch holds, and refund them. Returns how many.

    Whole at once: a child is held by the worker that holds its parent, so no kept child loses its rows.
    """
    await accounts.lock_all(connection, (tenant,))
    gone: list[Row[*tuple[Any, ...]]] = list(
        await connection.execute(
            select(Entry.id, (Entry.state_bytes + Entry.kv_bytes).label("size"))
            .where(Entry.tenant == tenant, orphan())
            .with_for_update(of=Entry)
        )
    )
    if not gone:
        return 0
    await connection.execute(
        update(Quota)
        .where(Quota.tenant == tenant)
        .values(used_bytes=Quota.used_bytes - sum(row.size for row in gone))
    )
    await connection.execute(
        insert(LedgerRow),
        [
            {"tenant": tenant, "entry": row.id, "kind": "refund", "bytes": -row.size, "at": now}
            for row in gone
        ],
    )
    await connection.execute(delete(Entry).where(Entry.id.in_([row.id for row in gone])))
    return len(gone)


async def alive(connection: AsyncConnection, *, since: datetime) -> list[str]:
    """Workers seen after `since`."""
    statement = select(Worker.id).where(Worker.reaped.is_(None), Worker.last_seen > since).order_by(Worker.id)
    return list((await connection.execute(statement)).scalars())


async def forget(connection: AsyncConnection, *, reaped_before: datetime) -> int:
    """Delete workers that are dead for long and hold nothing: ids are random, so the table would grow for ever."""
    statement = (
        delete(Worker)
        .where(Worker.reaped < reaped_before, ~exists().where(Replica.worker == Worker.id))
        .returning(Worker.id)
    )
    return len((await connection.execute(statement)).all())


def orphan() -> Any:
    """A condition: no current epoch holds the entry."""
    current = (
        exists()
        .where(Replica.entry == Entry.id)
        .where(Worker.id == Replica.worker, Worker.epoch == Replica.epoch, Worker.reaped.is_(None))
    )
    return ~current
