"""The tables. Bytes are counted here and nowhere else.

    tenants 1─n api_keys                 who may ask
    tenants 1─1 quotas                   a tenant's limits, and beside the byte limit the counter it is checked against
    tenants 1─n entries 1─n replicas     a prefix entry, and which worker (of which epoch) holds its bytes
                entries 1─n leases       who must not lose it now
    ledger                               every change of a tenant's bytes, signed; outlives its entries
    usage                                one row a finished request
    idempotency                          which request a caller's key stands for, for a time
    workers                              last heartbeat and epoch

The equation (C5), true in every committed transaction, for each tenant:
sum(ledger.bytes) = sum(entries.state_bytes + entries.kv_bytes) = quotas.used_bytes <= quotas.cache_bytes
(the last part holds at every grant; an operator may lower a quota below what is used).

States of an entry:

    reserved ──commit──> live ──withdraw──> evicting ──freed──> (gone), or with children: rows ──last child gone──> (gone)
        └──abort, expiry──> (gone), or with children: rows            rows ──reserve──> reserved

`rows`: the state part is free, the KV rows stay for entries above and stay charged; lookups do not see it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

EntryState = Literal["reserved", "live", "evicting", "rows"]
LedgerKind = Literal["reserve", "settle", "refund", "evict"]
STATES: Final = ("reserved", "live", "evicting", "rows")
KINDS: Final = ("reserve", "settle", "refund", "evict")


class Base(DeclarativeBase):
    """Named constraints, so that migrations can speak of them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        datetime: DateTime(timezone=True),
        str: Text(),
        bytes: LargeBinary(),
    }


def _one_of(column: str, values: tuple[str, ...], name: str) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=name)


class Tenant(Base):
    """A customer. `id` is what travels in messages; `name` is for people."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created: Mapped[datetime]
    disabled: Mapped[datetime | None]


class ApiKey(Base):
    """A key of a tenant: its SHA-256 alone. `prefix` is for recognising it in lists and opens nothing."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    digest: Mapped[str] = mapped_column(unique=True)  # hex
    prefix: Mapped[str]
    name: Mapped[str]
    created: Mapped[datetime]
    expires: Mapped[datetime | None]
    revoked: Mapped[datetime | None]
    last_used: Mapped[datetime | None]


class Quota(Base):
    """A tenant's limits, a column each. `used_bytes` stands in the same row so that one UPDATE checks and takes."""

    __tablename__ = "quotas"
    __table_args__ = (
        CheckConstraint("cache_bytes >= 0", name="cache_bytes"),
        CheckConstraint("used_bytes >= 0", name="used_bytes"),
        CheckConstraint("max_concurrent > 0", name="max_concurrent"),
    )

    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    cache_bytes: Mapped[int] = mapped_column(BigInteger)
    used_bytes: Mapped[int] = mapped_column(BigInteger)
    max_concurrent: Mapped[int | None] = mapped_column(Integer)  # requests in flight; None = no limit


class Entry(Base):
    """A prefix entry. It owns its state part and the KV rows (parent_position, position]."""

    __tablename__ = "entries"
    __table_args__ = (
        UniqueConstraint("root", "key", "layout_version"),
        Index("ix_entries_key", "key"),
        Index("ix_entries_children", "root", "parent", "layout_version"),
        Index("ix_entries_lru", "tenant", "last_used"),
        Index("ix_entries_reserved_until", "reserved_until"),
        _one_of("state", STATES, "state"),
        CheckConstraint("state_bytes >= 0 AND kv_bytes >= 0", name="bytes"),
        CheckConstraint("parent_position >= 0 AND parent_position < position", name="positions"),
        CheckConstraint("(state = 'reserved') = (reserved_until IS NOT NULL)", name="reserved_until"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    root: Mapped[bytes]
    key: Mapped[bytes]
    layout_version: Mapped[int]
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="RESTRICT"))
    fingerprint: Mapped[str]
    parent: Mapped[bytes | None]
    splits: Mapped[bytes | None]  # whose lower rows it took when it was reserved; an abort gives them back
    position: Mapped[int]
    parent_position: Mapped[int]
    state_bytes: Mapped[int] = mapped_column(BigInteger)
    kv_bytes: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str]
    reservation: Mapped[str] = mapped_column(unique=True)  # of the newest reserve; also after the commit
    request: Mapped[str]  # that published it
    reserved_until: Mapped[datetime | None]
    digest: Mapped[str]
    created: Mapped[datetime]
    last_used: Mapped[datetime]
    hits: Mapped[int] = mapped_column(BigInteger)


class Replica(Base):
    """A worker that holds an entry's bytes. Bytes die with the epoch."""

    __tablename__ = "replicas"
    __table_args__ = (Index("ix_replicas_holder", "worker", "epoch"), _one_of("tier", ("worker",), "tier"))

    entry: Mapped[int] = mapped_column(ForeignKey("entries.id", ondelete="CASCADE"), primary_key=True)
    worker: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[str]
    tier: Mapped[str]


class LeaseRow(Base):
    """A promise that an entry stays until `expires`."""

    __tablename__ = "leases"
    __table_args__ = (UniqueConstraint("entry", "worker", "request"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    entry: Mapped[int] = mapped_column(ForeignKey("entries.id", ondelete="CASCADE"))
    worker: Mapped[str]
    request: Mapped[str]
    expires: Mapped[datetime] = mapped_column(index=True)


class LedgerRow(Base):
    """One change of a tenant's bytes. `entry` is no foreign key: the history outlives the entry."""

    __tablename__ = "ledger"
    __table_args__ = (_one_of("kind", KINDS, "kind"), Index("ix_ledger_entry", "entry"))

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="RESTRICT"), index=True)
    entry: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)  # signed
    at: Mapped[datetime]


class Usage(Base):
    """What a finished request used. Unique by request, so settling twice is settling once."""

    __tablename__ = "usage"
    __table_args__ = (Index("ix_usage_tenant", "tenant", "at"),)

    request: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]  # no foreign keys: a row must be writable whatever became of the tenant
    api_key: Mapped[str]
    model: Mapped[str]
    worker: Mapped[str]
    attempt: Mapped[int]
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    finish: Mapped[str]  # the choices' reasons, comma-separated
    cancel_reason: Mapped[str | None]
    failure_code: Mapped[str | None]
    cache_decision: Mapped[str]
    exact: Mapped[bool] = mapped_column(Boolean)
    at: Mapped[datetime]


class IdempotencyKey(Base):
    """A caller's key and the request that it stands for, until `expires`. Both are known by digests alone."""

    __tablename__ = "idempotency"

    tenant: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body: Mapped[str]
    request: Mapped[str] = mapped_column(unique=True)
    sheet: Mapped[bytes]  # how its tokens are told; the gateways' own
    expires: Mapped[datetime] = mapped_column(index=True)


class Worker(Base):
    """A worker as the broker last saw it. A reaped epoch lost its entries and must begin a new one."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[str]
    fingerprint: Mapped[str]
    last_seen: Mapped[datetime]  # by the broker's clock
    beat_ns: Mapped[int] = mapped_column(BigInteger)  # the newest heartbeat's own stamp; orders epochs
    reaped: Mapped[datetime | None]
