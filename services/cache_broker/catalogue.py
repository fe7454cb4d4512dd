"""Entries: lookup, commit, abort, drop (and `reserving`). Callers have validated the namespace; all but `lookup` lock the account.

An entry is charged from the moment it is reserved until its bytes are free. `drop` is the one way out, whatever the
reason: an entry with children keeps its rows (state `rows`), one without goes, and takes stateless ancestors along.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from sqlalchemy import ARRAY, LargeBinary, Row, any_, delete, exists, literal, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker import accounts, splitting
from services.cache_broker.models import Entry, LeaseRow, LedgerKind, Replica, Worker
from shared.errors import Conflict
from shared.protocol.messages import Commit, EntryRef, Lookup

EntryRow: TypeAlias = Row[*tuple[Any, ...]]
"""A row with the columns of `COLUMNS`, at least."""


async def lookup(
    connection: AsyncConnection, call: Lookup, *, now: datetime, alive_after: timedelta
) -> EntryRef | None:
    """The longest live entry of the chain that a living worker holds, and its holders. Counts as a use of it."""
    holders = (
        select(Replica.worker)
        .join(Worker, (Worker.id == Replica.worker) & (Worker.epoch == Replica.epoch))
        .where(Worker.reaped.is_(None), Worker.last_seen > now - alive_after)
    )
    longest = (
        select(Entry.id)
        .where(
            Entry.root == call.root,
            Entry.layout_version == call.layout_version,
            key_among(call.chain),
            Entry.state == "live",
            holders.where(Replica.entry == Entry.id).exists(),
        )
        .order_by(Entry.position.desc())
        .limit(1)
        .scalar_subquery()
    )
    used = (
        update(Entry)
        .where(Entry.id == longest, Entry.state == "live")
        .values(last_used=now, hits=Entry.hits + 1)
        .returning(Entry.id, Entry.key, Entry.position)
    )
    row = (await connection.execute(used)).one_or_none()
    if row is None:
        return None
    workers = (
        await connection.execute(holders.where(Replica.entry == row.id).order_by(Replica.worker))
    ).scalars()
    return EntryRef(key=row.key, position=row.position, workers=tuple(workers))


async def commit(connection: AsyncConnection, call: Commit, *, now: datetime) -> None:
    """Make a reserved entry visible. Idempotent.

    Raises:
        Conflict: `reservation_gone`, it expired, was aborted, or is another worker's: the bytes must be freed.
    """
    entry = await by_reservation(connection, call.reservation_id, call.worker_id, call.epoch)
    if entry is None or entry.state not in ("reserved", "live"):
        raise Conflict("the reservation is gone", code="reservation_gone")
    if entry.state == "live":
        return
    await connection.execute(
        update(Entry)
        .where(Entry.id == entry.id)
        .values(state="live", reserved_until=None, digest=call.digest, last_used=now)
    )
    await accounts.note(connection, entry.tenant, entry.id, 0, "settle", now)


async def abort(connection: AsyncConnection, reservation: str, worker: str, *, now: datetime) -> None:
    """The bytes of a reservation will not exist; also after a commit whose answer was lost. Idempotent."""
    entry = await by_reservation(connection, reservation, worker, None)
    if entry is None or entry.state not in ("reserved", "live"):
        return
    if entry.state == "reserved" and await splitting.give_back_rows(connection, entry, now):
        return
    await drop(connection, entry, "refund", now)


async def drop(connection: AsyncConnection, entry: EntryRow, kind: LedgerKind, now: datetime) -> None:
    """Give back what nobody needs any more of an entry (a row with the columns of `COLUMNS`); leases on it end."""
    current: EntryRow | None = entry
    while current is not None:
        above = exists().where(
            Entry.root == current.root,
            Entry.parent == current.key,
            Entry.layout_version == current.layout_version,
        )
        if (await connection.execute(select(above))).scalar_one():
            await _keep_rows(connection, current, kind, now)
            return
        await accounts.give_back(
            connection, current.tenant, current.id, current.state_bytes + current.kv_bytes, kind, now
        )
        await connection.execute(delete(Entry).where(Entry.id == current.id))
        current, kind = await _stateless_parent(connection, current), "evict"


COLUMNS: Final = (
    Entry.id,
    Entry.tenant,
    Entry.root,
    Entry.key,
    Entry.layout_version,
    Entry.parent,
    Entry.parent_position,
    Entry.splits,
    Entry.position,
    Entry.state_bytes,
    Entry.kv_bytes,
    Entry.state,
    Entry.reservation,
    Entry.request,
)


async def by_reservation(
    connection: AsyncConnection, reservation: str, worker: str, epoch: str | None
) -> EntryRow | None:
    """The entry of a worker's reservation, with its account locked; None when there is none (any more)."""
    found = (
        select(*COLUMNS)
        .join(Replica, Replica.entry == Entry.id)
        .where(Entry.reservation == reservation, Replica.worker == worker)
    )
    if epoch is not None:
        found = found.where(Replica.epoch == epoch)
    row = (await connection.execute(found)).one_or_none()
    if row is None:
        return None
    await accounts.lock_all(connection, (row.tenant,))
    return (await connection.execute(found.with_for_update(of=Entry))).one_or_none()


def held_by(worker: str, epoch: str) -> Any:
    """A condition: the worker, in this epoch, holds the entry's bytes."""
    return exists().where(Replica.entry == Entry.id, Replica.worker == worker, Replica.epoch == epoch)


def key_among(keys: Sequence[bytes]) -> Any:
    """A condition: the entry's key is one of `keys`. One array parameter, so that one prepared statement serves all."""
    return Entry.key == any_(literal(list(keys), ARRAY(LargeBinary)))


def leased(now: datetime) -> Any:
    """A condition: somebody has a lease on the entry that is not over."""
    return exists().where(LeaseRow.entry == Entry.id, LeaseRow.expires > now)


async def _keep_rows(connection: AsyncConnection, entry: EntryRow, kind: LedgerKind, now: datetime) -> None:
    if entry.state == "rows":
        return
    await connection.execute(delete(LeaseRow).where(LeaseRow.entry == entry.id))
    await connection.execute(
        update(Entry).where(Entry.id == entry.id).values(state="rows", state_bytes=0, reserved_until=None)
    )
    await accounts.give_back(connection, entry.tenant, entry.id, entry.state_bytes, kind, now)


async def _stateless_parent(connection: AsyncConnection, entry: EntryRow) -> EntryRow | None:
    if entry.parent is None:
        return None
    statement = (
        select(*COLUMNS)
        .where(
            Entry.root == entry.root,
            Entry.key == entry.parent,
            Entry.layout_version == entry.layout_version,
            Entry.state == "rows",
        )
        .with_for_update(of=Entry)
    )
    return (await connection.execute(statement)).one_or_none()
