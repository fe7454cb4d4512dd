"""Entries: reserve, commit, abort, drop. Callers have validated the namespace; all but `lookup` lock the account.

An entry is charged from the moment it is reserved until its bytes are free. `drop` is the one way out, whatever the
reason: an entry with children keeps its rows (state `rows`), one without goes, and takes stateless ancestors along.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from sqlalchemy import ARRAY, LargeBinary, Row, any_, delete, exists, insert, literal, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker import accounts, presence, splitting
from services.cache_broker.eviction import Held, plan
from services.cache_broker.models import Entry, LeaseRow, LedgerKind, Replica, Worker
from shared.errors import Conflict, PermissionRefused
from shared.protocol.messages import Commit, EntryRef, Lookup, Reserve, ReserveReply

EntryRow: TypeAlias = Row[*tuple[Any, ...]]
"""A row with the columns of `COLUMNS`, at least."""

EVICT_AT_ONCE: Final = 64
"""Keys in one answer: a bounded message, and a bounded stall of the worker that frees them."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a reservation holds (s)."""

    reservation_ttl_s: float


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


async def reserve(
    connection: AsyncConnection, call: Reserve, *, now: datetime, limits: Limits
) -> ReserveReply:
    """Take room for an entry, or say why not. The counter, the ledger and the entry change together.

    Raises:
        PermissionRefused: `wrong_namespace`, there is no such tenant.
        Conflict: `epoch_gone` or `parent_gone`.
    """
    account = await accounts.lock(connection, call.namespace.tenant)
    if account is None:
        raise PermissionRefused("no such tenant", code="wrong_namespace")
    await presence.admit(connection, call.worker_id, call.epoch, call.namespace.fingerprint, now=now)
    known = await _known(connection, call)
    if known is not None and known.state == "evicting" and known.held_here:
        await drop(connection, known, "evict", now)
        account = await accounts.lock(connection, call.namespace.tenant) or account
        known = await _known(connection, call)
    if (
        known is not None
        and known.held_here
        and known.state == "reserved"
        and known.request == call.request_id
    ):
        return _decision("granted", known.reservation)
    if known is not None and not (known.held_here and known.state == "rows"):
        return _decision("exists")
    await _check_parent(connection, call)
    heir = await _heir(connection, call) if known is None and call.splits is not None else None
    # Rows that stayed for children, or that pass over from another entry, are charged already.
    charged = known is not None or heir is not None
    size = call.state_bytes if charged else call.state_bytes + call.kv_bytes
    if size > account.cache_bytes:
        return _decision("skips_budget")
    if not await accounts.take(connection, call.namespace.tenant, size):
        need = account.used_bytes + size - account.cache_bytes
        held = await _held(connection, call, now)
        keys = plan(held, need=need, protect=call.parent, limit=EVICT_AT_ONCE)
        return _decision("skips_pinned") if keys is None else _decision("evict", evict=keys)
    until = now + timedelta(seconds=limits.reservation_ttl_s)
    if known is not None:
        entry, reservation = known.id, await _revive(connection, known.id, call, now, until)
    else:
        entry, reservation = await _insert(connection, call, now, until)
    if heir is not None:
        await splitting.pass_rows(connection, heir, call, now)
        size += call.kv_bytes
    await accounts.note(connection, call.namespace.tenant, entry, size, "reserve", now)
    return _decision("granted", reservation)


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


def _decision(decision: Any, reservation: str | None = None, evict: tuple[bytes, ...] = ()) -> ReserveReply:
    return ReserveReply(failure=None, decision=decision, reservation_id=reservation, evict=evict)


async def _known(connection: AsyncConnection, call: Reserve) -> EntryRow | None:
    statement = (
        select(*COLUMNS, held_by(call.worker_id, call.epoch).label("held_here"))
        .where(Entry.root == call.root, Entry.key == call.key, Entry.layout_version == call.layout_version)
        .with_for_update(of=Entry)
    )
    return (await connection.execute(statement)).one_or_none()


async def _check_parent(connection: AsyncConnection, call: Reserve) -> None:
    """The rows below an entry must be charged somewhere: its parent is held here and ends where it begins."""
    if call.parent is None:
        if call.parent_position != 0:
            raise Conflict("an entry without a parent begins at position 0", code="parent_gone")
        return
    statement = select(Entry.position).where(
        Entry.root == call.root,
        Entry.key == call.parent,
        Entry.layout_version == call.layout_version,
        held_by(call.worker_id, call.epoch),
    )
    position = (await connection.execute(statement)).scalar_one_or_none()
    if position is None or position != call.parent_position:
        raise Conflict("the parent entry is not held by this worker", code="parent_gone")


async def _heir(connection: AsyncConnection, call: Reserve) -> EntryRow:
    """The entry whose lower rows the new one takes.

    Raises:
        Conflict: `parent_gone`, it is not held here, or its rows do not lie as the call says.
    """
    statement = (
        select(*COLUMNS)
        .where(
            Entry.root == call.root,
            Entry.key == call.splits,
            Entry.layout_version == call.layout_version,
            Entry.parent.is_not_distinct_from(call.parent),
            Entry.position > call.position,
            Entry.kv_bytes >= call.kv_bytes,
            held_by(call.worker_id, call.epoch),
        )
        .with_for_update(of=Entry)
    )
    heir = (await connection.execute(statement)).one_or_none()
    if heir is None:
        raise Conflict("the entry to split does not lie so", code="parent_gone")
    return heir


async def _held(connection: AsyncConnection, call: Reserve, now: datetime) -> list[Held]:
    statement = select(
        Entry.key,
        Entry.parent,
        Entry.state_bytes,
        Entry.kv_bytes,
        Entry.state,
        Entry.last_used,
        leased(now).label("leased"),
    ).where(Entry.tenant == call.namespace.tenant, held_by(call.worker_id, call.epoch))
    return [Held(**row._mapping) for row in await connection.execute(statement)]


async def _insert(
    connection: AsyncConnection, call: Reserve, now: datetime, until: datetime
) -> tuple[int, str]:
    reservation = uuid.uuid4().hex
    statement = insert(Entry).values(
        root=call.root,
        key=call.key,
        layout_version=call.layout_version,
        tenant=call.namespace.tenant,
        fingerprint=call.namespace.fingerprint,
        parent=call.parent,
        splits=call.splits,
        position=call.position,
        parent_position=call.parent_position,
        state_bytes=call.state_bytes,
        kv_bytes=call.kv_bytes,
        state="reserved",
        reservation=reservation,
        request=call.request_id,
        reserved_until=until,
        digest="",
        created=now,
        last_used=now,
        hits=0,
    )
    entry = int((await connection.execute(statement.returning(Entry.id))).scalar_one())
    await connection.execute(
        insert(Replica).values(entry=entry, worker=call.worker_id, epoch=call.epoch, tier="worker")
    )
    return entry, reservation


async def _revive(
    connection: AsyncConnection, entry: int, call: Reserve, now: datetime, until: datetime
) -> str:
    """Rows that stayed for children get a state again."""
    reservation = uuid.uuid4().hex
    await connection.execute(
        update(Entry)
        .where(Entry.id == entry)
        .values(
            state="reserved",
            state_bytes=call.state_bytes,
            reservation=reservation,
            request=call.request_id,
            reserved_until=until,
            splits=None,  # an abort of this reservation leaves the rows here
            last_used=now,
        )
    )
    return reservation


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
