"""The audit (C5): do ledger, entries and counters say the same, and do the workers really hold what is charged?

The books are read in one statement, so that they are of one moment. Workers answer a little later: what differs is asked
again after a pause, and only a difference that stays is one (bytes equal the books when the cache is quiet).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker import presence
from services.cache_broker.database import Database, Work
from services.cache_broker.models import Entry, LeaseRow, LedgerRow, Quota, Replica, Tenant
from shared.clock import Clock
from shared.errors import BurstlineError
from shared.protocol import codec, subjects
from shared.protocol.messages import AuditCall, AuditReply, HeldEntry
from shared.transport.base import Transport

PAGE: Final = 1024
"""Entries in one answer: about 100 bytes each, far below a payload's limit."""
MAX_PAGES: Final = 4096
ASK_S: Final = 5.0
LOOKS: Final = 4
PAUSE_S: Final = 0.5
GRACE: Final = timedelta(seconds=60)
"""How long something expired may wait for the sweeper."""
ALIVE: Final = timedelta(seconds=30)

EntryId = tuple[bytes, bytes]


@dataclass(frozen=True, kw_only=True)
class Books:
    """One tenant's figures of one moment; bytes and counts."""

    tenant: str  # name
    quota_bytes: int
    counter_bytes: int
    ledger_bytes: int
    entry_bytes: int
    entries: int
    orphans: int  # entries that no living epoch holds
    expired_reservations: int
    expired_leases: int

    @property
    def balanced(self) -> bool:
        """The equation."""
        return self.ledger_bytes == self.entry_bytes == self.counter_bytes


@dataclass(frozen=True, kw_only=True)
class Charged:
    """What the books say that a worker holds of an entry. A reserved entry's bytes may exist or not."""

    state_bytes: int
    kv_bytes: int
    reserved: bool
    splits: bytes | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An entry whose real bytes are not the charged ones."""

    worker: str
    key: str  # hex, the first 16 digits
    charged_bytes: int
    real_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an audit found."""

    books: tuple[Books, ...]
    asked: tuple[str, ...]  # workers that answered
    silent: tuple[str, ...]  # living ones that did not
    differences: tuple[Difference, ...]


async def audit(database: Database, transport: Transport | None, clock: Clock) -> Report:
    """Look until the books balance and the workers agree, at most `LOOKS` times; the last look counts.

    Raises:
        Unavailable: the database is away.
    """
    for look in range(1, LOOKS + 1):
        report = await _look(database, transport, clock)
        if look == LOOKS or (all(books.balanced for books in report.books) and not report.differences):
            break
        await asyncio.sleep(PAUSE_S)
    return report


def compare(worker: str, charged: Mapping[EntryId, Charged], real: Sequence[HeldEntry]) -> list[Difference]:
    """Entries of one worker whose bytes differ. Of reserved ones, none or all of the bytes may exist.

    So rows that pass over to a reserved entry may still be with the one that it splits.
    """
    held = {(entry.root, entry.key): (entry.state_bytes, entry.kv_bytes) for entry in real}
    charged = _as_held(charged, held)
    found = []
    for identity in sorted(charged.keys() | held.keys()):
        book, bytes_ = charged.get(identity), held.get(identity)
        if book is None or (book.state_bytes, book.kv_bytes) != bytes_:
            found.append(
                Difference(
                    worker=worker,
                    key=identity[1].hex()[:16],
                    charged_bytes=0 if book is None else book.state_bytes + book.kv_bytes,
                    real_bytes=sum(bytes_ or (0, 0)),
                )
            )
    return found


def _as_held(
    charged: Mapping[EntryId, Charged], held: Mapping[EntryId, tuple[int, int]]
) -> dict[EntryId, Charged]:
    """The books without what is only reserved and does not exist: whole entries, or the states of rows that stayed."""
    books = dict(charged)
    for (root, key), book in charged.items():
        if not book.reserved:
            continue
        if (root, key) in held:
            if held[root, key] == (0, book.kv_bytes):
                books[root, key] = replace(book, state_bytes=0)
            continue
        del books[root, key]
        heir = books.get((root, book.splits)) if book.splits is not None else None
        if heir is not None and book.splits is not None:
            books[root, book.splits] = replace(heir, kv_bytes=heir.kv_bytes + book.kv_bytes)
    return books


async def read_books(connection: AsyncConnection, *, now: datetime) -> tuple[Books, ...]:
    """The books of every tenant, by name, in one statement."""

    def figure(statement: Select[Any]) -> Any:
        return statement.correlate(Tenant).scalar_subquery()

    late = now - GRACE
    mine = Entry.tenant == Tenant.id
    count = select(func.count()).select_from(Entry).where(mine)
    size = func.coalesce(func.sum(Entry.state_bytes + Entry.kv_bytes), 0)
    leases = select(func.count()).select_from(LeaseRow).join(Entry, Entry.id == LeaseRow.entry)
    statement = (
        select(
            Tenant.name.label("tenant"),
            Quota.cache_bytes.label("quota_bytes"),
            Quota.used_bytes.label("counter_bytes"),
            figure(
                select(func.coalesce(func.sum(LedgerRow.bytes), 0)).where(LedgerRow.tenant == Tenant.id)
            ).label("ledger_bytes"),
            figure(select(size).where(mine)).label("entry_bytes"),
            figure(count).label("entries"),
            figure(count.where(presence.orphan())).label("orphans"),
            figure(count.where(Entry.reserved_until < late)).label("expired_reservations"),
            figure(leases.where(mine, LeaseRow.expires < late)).label("expired_leases"),
        )
        .join(Quota, Quota.tenant == Tenant.id)
        .order_by(Tenant.name)
    )
    rows = await connection.execute(statement)
    return tuple(_books(dict(row._mapping)) for row in rows)


async def read_charged(connection: AsyncConnection, worker: str) -> dict[EntryId, Charged]:
    """What a worker holds by the books."""
    statement = (
        select(Entry.root, Entry.key, Entry.state_bytes, Entry.kv_bytes, Entry.state, Entry.splits)
        .join(Replica, Replica.entry == Entry.id)
        .where(Replica.worker == worker)
    )
    return {
        (row.root, row.key): Charged(
            state_bytes=row.state_bytes,
            kv_bytes=row.kv_bytes,
            reserved=row.state == "reserved",
            splits=row.splits,
        )
        for row in await connection.execute(statement)
    }


async def ask(transport: Transport, worker: str) -> list[HeldEntry] | None:
    """What a worker says that it holds; None when it does not answer."""
    entries: list[HeldEntry] = []
    try:
        for _ in range(MAX_PAGES):
            call = codec.encode(AuditCall(skip=len(entries), limit=PAGE))
            answer = await transport.request(subjects.audit(worker), call, timeout=ASK_S)
            reply = codec.decode_as(AuditReply, answer)
            if reply.failure is not None:
                return None
            entries.extend(reply.entries)
            if len(entries) >= reply.total or not reply.entries:
                return entries
    except BurstlineError:
        return None
    return None


async def _look(database: Database, transport: Transport | None, clock: Clock) -> Report:
    now = clock.now()
    books = await database.run(lambda connection: read_books(connection, now=now))
    workers = await database.run(lambda connection: presence.alive(connection, since=now - ALIVE))
    asked: list[str] = []
    differences: list[Difference] = []
    for worker in workers if transport is not None else ():
        assert transport is not None
        real = await ask(transport, worker)
        if real is None:
            continue
        charged = await database.run(_charged_reader(worker))
        asked.append(worker)
        differences.extend(compare(worker, charged, real))
    silent = tuple(worker for worker in workers if worker not in asked)
    return Report(books=books, asked=tuple(asked), silent=silent, differences=tuple(differences))


def _books(row: Mapping[str, Any]) -> Books:
    figures = {name: int(value) for name, value in row.items() if name != "tenant"}  # sums come as Decimal
    return Books(tenant=str(row["tenant"]), **figures)


def _charged_reader(worker: str) -> Work[dict[EntryId, Charged]]:
    return lambda connection: read_charged(connection, worker)
