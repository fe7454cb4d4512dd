"""Rows that pass from one entry to another: a boundary is captured in the middle of an entry's rows.

    before   parent ──────────── rows ────────────> heir
    after    parent ── rows ──> new ──── rows ────> heir

No bytes come or go: what the new entry takes over, the heir is no longer charged for. An abort undoes it. A reservation
that merely expires does not: its worker may have kept the rows apart, so they stay with the new entry (`rows`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, exists, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker import accounts
from services.cache_broker.models import Entry
from shared.protocol.messages import Reserve


async def pass_rows(
    connection: AsyncConnection, heir: Row[*tuple[Any, ...]], call: Reserve, now: datetime
) -> None:
    """Take `call.kv_bytes` from the heir, whose parent is now the new entry. The caller charges them there."""
    await connection.execute(
        update(Entry)
        .where(Entry.id == heir.id)
        .values(parent=call.key, parent_position=call.position, kv_bytes=Entry.kv_bytes - call.kv_bytes)
    )
    await accounts.note(connection, heir.tenant, heir.id, -call.kv_bytes, "refund", now)


async def give_back_rows(connection: AsyncConnection, entry: Row[*tuple[Any, ...]], now: datetime) -> bool:
    """Undo the split that an entry was reserved with. False, and nothing done, when there is none to undo."""
    if entry.splits is None or await _others_stand_on(connection, entry):
        return False
    heirs = (
        update(Entry)
        .where(
            Entry.root == entry.root,
            Entry.key == entry.splits,
            Entry.layout_version == entry.layout_version,
            Entry.parent == entry.key,
        )
        .values(
            parent=entry.parent,
            parent_position=entry.parent_position,
            kv_bytes=Entry.kv_bytes + entry.kv_bytes,
        )
        .returning(Entry.id)
    )
    heir = (await connection.execute(heirs)).scalar_one_or_none()
    if heir is None:
        return False
    await accounts.give_back(connection, entry.tenant, entry.id, entry.state_bytes, "refund", now)
    await accounts.note(connection, entry.tenant, entry.id, -entry.kv_bytes, "refund", now)
    await accounts.note(connection, entry.tenant, heir, entry.kv_bytes, "reserve", now)
    await connection.execute(delete(Entry).where(Entry.id == entry.id))
    return True


async def _others_stand_on(connection: AsyncConnection, entry: Row[*tuple[Any, ...]]) -> bool:
    others = exists().where(
        Entry.root == entry.root,
        Entry.parent == entry.key,
        Entry.layout_version == entry.layout_version,
        Entry.key != entry.splits,
    )
    return bool((await connection.execute(select(others))).scalar_one())
