"""Reserving: room for an entry before its bytes exist, or the reason why not.

    none, or rows kept for children ──charge──> reserved        exists: somebody who lives was first
    no room ──> evict: the keys to free, if that makes room     skips_pinned: it does not     skips_budget: it never can

The account is locked throughout, so the decision and the charge are of one moment; the charge itself is still one
statement that checks and takes, and holds without the lock (FR-88).

An entry that a silent worker holds gives way to a living one: the silent worker's epoch ends now, not at the next sweep,
and this tenant's entries of it go in this transaction, leased or not. Should that worker still live, it is told so by
`epoch_gone`, and begins a new epoch without them.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker import accounts, presence, splitting
from services.cache_broker.catalogue import COLUMNS, EntryRow, drop, held_by, leased
from services.cache_broker.eviction import Held, plan
from services.cache_broker.models import Entry, Replica
from shared.errors import Conflict, PermissionRefused
from shared.protocol.messages import Reserve, ReserveReply

EVICT_AT_ONCE: Final = 64
"""Keys in one answer: a bounded message, and a bounded stall of the worker that frees them."""


async def reserve(
    connection: AsyncConnection,
    call: Reserve,
    *,
    now: datetime,
    ttl: timedelta,
    silent_since: datetime | None,
) -> ReserveReply:
    """Take room for an entry for `ttl`. The counter, the ledger and the entry change together.

    Workers last seen before `silent_since` are silent; None = silence cannot be judged now.

    Raises:
        PermissionRefused: `wrong_namespace`, there is no such tenant.
        Conflict: `epoch_gone` or `parent_gone`.
    """
    if await accounts.lock(connection, call.namespace.tenant) is None:
        raise PermissionRefused("no such tenant", code="wrong_namespace")
    await presence.admit(connection, call.worker_id, call.epoch, call.namespace.fingerprint, now=now)
    known = await _known(connection, call)
    if known is not None and known.state == "evicting" and known.held_here:
        await drop(connection, known, "evict", now)
        known = await _known(connection, call)
    if known is not None and not known.held_here and await _gives_way(connection, known, silent_since, now):
        known = await _known(connection, call)
    if known is not None:
        if known.held_here and known.state == "reserved" and known.request == call.request_id:
            return _decision("granted", known.reservation)
        if not (known.held_here and known.state == "rows"):
            return _decision("exists")
    await _check_parent(connection, call)
    heir = await _heir(connection, call) if known is None and call.splits is not None else None
    # Rows that stayed for children, or that pass over from another entry, are charged already.
    charged = known is not None or heir is not None
    size = call.state_bytes if charged else call.state_bytes + call.kv_bytes
    if size and not await accounts.take(connection, call.namespace.tenant, size):
        return await _no_room(connection, call, size, now)
    return await _grant(connection, call, known, heir, size, now, now + ttl)


async def _grant(
    connection: AsyncConnection,
    call: Reserve,
    known: EntryRow | None,
    heir: EntryRow | None,
    size: int,
    now: datetime,
    until: datetime,
) -> ReserveReply:
    """Write down what `size` bytes were taken for."""
    if known is not None:
        entry, reservation = known.id, await _revive(connection, known.id, call, now, until)
    else:
        entry, reservation = await _insert(connection, call, now, until)
    if heir is not None:
        await splitting.pass_rows(connection, heir, call, now)
        size += call.kv_bytes
    await accounts.note(connection, call.namespace.tenant, entry, size, "reserve", now)
    return _decision("granted", reservation)


async def _no_room(connection: AsyncConnection, call: Reserve, size: int, now: datetime) -> ReserveReply:
    """What to free, or that nothing helps."""
    account = await accounts.lock(connection, call.namespace.tenant)
    if account is None or size > account.cache_bytes:
        return _decision("skips_budget")
    need = account.used_bytes + size - account.cache_bytes
    ground = {key for key in (call.parent, call.splits) if key is not None}
    keys = plan(await _held(connection, call, now), need=need, protect=ground, limit=EVICT_AT_ONCE)
    return _decision("skips_pinned") if keys is None else _decision("evict", evict=keys)


def _decision(decision: Any, reservation: str | None = None, evict: tuple[bytes, ...] = ()) -> ReserveReply:
    return ReserveReply(failure=None, decision=decision, reservation_id=reservation, evict=evict)


async def _known(connection: AsyncConnection, call: Reserve) -> EntryRow | None:
    statement = (
        select(*COLUMNS, held_by(call.worker_id, call.epoch).label("held_here"))
        .where(Entry.root == call.root, Entry.key == call.key, Entry.layout_version == call.layout_version)
        .with_for_update(of=Entry)
    )
    return (await connection.execute(statement)).one_or_none()


async def _gives_way(
    connection: AsyncConnection, known: EntryRow, silent_since: datetime | None, now: datetime
) -> bool:
    """Drop an entry of dead holders, with all that they held for its tenant. False when one of them lives."""
    if silent_since is not None:
        await presence.end_silent_holders(connection, known.id, silent_since=silent_since, now=now)
    abandoned = select(Entry.id).where(Entry.id == known.id, presence.orphan())
    if (await connection.execute(abandoned)).scalar_one_or_none() is None:
        return False
    await presence.drop_orphans(connection, known.tenant, now=now)
    return True


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
            splits=call.splits,  # without one, an abort of this reservation leaves the rows here
            last_used=now,
        )
    )
    return reservation
