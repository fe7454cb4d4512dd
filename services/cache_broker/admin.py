"""Administration: tenants, keys, quotas, entries. Functions of one connection, for the CLI and for the first start.

A key is `bl_` and 32 URL-safe characters (192 bits). It is shown once; the tables hold its SHA-256 and a prefix.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker import accounts
from services.cache_broker.models import ApiKey, Entry, Quota, Replica, Tenant
from shared.errors import Conflict, InvalidRequest, NotFound

KEY_PREFIX: Final = "bl_"
SHOWN: Final = 8
DEFAULT_CACHE_BYTES: Final = 4 << 30
_NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,62}$")


@dataclass(frozen=True, kw_only=True)
class TenantView:
    """A tenant with its limits; bytes, and requests in flight (None = no limit)."""

    id: str
    name: str
    created: datetime
    disabled: datetime | None
    cache_bytes: int
    used_bytes: int
    max_concurrent: int | None


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """A key just made. `key` is the secret; nothing can show it again."""

    id: str
    key: str


@dataclass(frozen=True, kw_only=True)
class KeyView:
    """What is known of a key."""

    id: str
    tenant: str  # name
    name: str
    prefix: str
    created: datetime
    expires: datetime | None
    revoked: datetime | None
    last_used: datetime | None


@dataclass(frozen=True, kw_only=True)
class EntryView:
    """A prefix entry of a tenant. Bytes; positions in tokens."""

    id: int
    key: bytes
    position: int
    parent_position: int
    state: str
    state_bytes: int
    kv_bytes: int
    hits: int
    last_used: datetime
    workers: tuple[str, ...]


_TENANTS: Final = select(
    Tenant.id,
    Tenant.name,
    Tenant.created,
    Tenant.disabled,
    Quota.cache_bytes,
    Quota.used_bytes,
    Quota.max_concurrent,
).join(Quota, Quota.tenant == Tenant.id)


def digest(key: str) -> str:
    """What stands for a key in the tables and in `Authenticate`."""
    return hashlib.sha256(key.encode()).hexdigest()


async def create_tenant(
    connection: AsyncConnection,
    name: str,
    *,
    now: datetime,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    max_concurrent: int | None = None,
) -> str:
    """Make a tenant with its quota; returns its id.

    Raises:
        InvalidRequest: a name other than lower-case letters, digits and '-', or limits out of range.
        Conflict: the name is taken.
    """
    if not _NAME.match(name):
        raise InvalidRequest("a tenant's name has 1 to 63 lower-case letters, digits and '-'", param="name")
    _check_limits(cache_bytes, max_concurrent)
    if (await connection.execute(select(Tenant.id).where(Tenant.name == name))).first() is not None:
        raise Conflict(f"there is a tenant {name} already")
    tenant = f"t_{secrets.token_hex(6)}"
    await connection.execute(insert(Tenant).values(id=tenant, name=name, created=now))
    await connection.execute(
        insert(Quota).values(
            tenant=tenant, cache_bytes=cache_bytes, used_bytes=0, max_concurrent=max_concurrent
        )
    )
    return tenant


async def list_tenants(connection: AsyncConnection) -> list[TenantView]:
    """All tenants, by name."""
    rows = await connection.execute(_TENANTS.order_by(Tenant.name))
    return [TenantView(**row._mapping) for row in rows]


async def find_tenant(connection: AsyncConnection, name: str) -> TenantView:
    """A tenant by name or id.

    Raises:
        NotFound: there is none.
    """
    # An id has an underscore, which no name may have: at most one row.
    row = (
        await connection.execute(_TENANTS.where((Tenant.name == name) | (Tenant.id == name)))
    ).one_or_none()
    if row is None:
        raise NotFound(f"there is no tenant {name}")
    return TenantView(**row._mapping)


async def disable_tenant(connection: AsyncConnection, name: str, *, now: datetime) -> None:
    """Refuse a tenant's keys from now on, and take its entries out of use."""
    tenant = await find_tenant(connection, name)
    await connection.execute(
        update(Tenant).where(Tenant.id == tenant.id, Tenant.disabled.is_(None)).values(disabled=now)
    )
    await withdraw_entries(connection, tenant.id)


async def set_quota(
    connection: AsyncConnection, name: str, *, cache_bytes: int | None, max_concurrent: int | None
) -> None:
    """Change what is given. `max_concurrent` 0 removes that limit. A byte limit below what is used only stops growth."""
    tenant = await find_tenant(connection, name)
    values: dict[str, int | None] = {}
    if cache_bytes is not None:
        values["cache_bytes"] = cache_bytes
    if max_concurrent is not None:
        values["max_concurrent"] = max_concurrent or None
    _check_limits(cache_bytes or 0, max_concurrent or None)
    if values:
        await connection.execute(update(Quota).where(Quota.tenant == tenant.id).values(**values))


async def create_key(
    connection: AsyncConnection,
    tenant: str,
    *,
    now: datetime,
    name: str = "",
    expires: datetime | None = None,
) -> NewKey:
    """Make a key of a tenant (name or id). The secret is in the answer and nowhere else."""
    owner = await find_tenant(connection, tenant)
    key = KEY_PREFIX + secrets.token_urlsafe(24)
    identifier = f"k_{secrets.token_hex(6)}"
    await connection.execute(
        insert(ApiKey).values(
            id=identifier,
            tenant=owner.id,
            digest=digest(key),
            prefix=key[: len(KEY_PREFIX) + SHOWN],
            name=name,
            created=now,
            expires=expires,
        )
    )
    return NewKey(id=identifier, key=key)


async def list_keys(connection: AsyncConnection, tenant: str | None = None) -> list[KeyView]:
    """Keys of all tenants or of one."""
    statement = select(
        ApiKey.id,
        Tenant.name.label("tenant"),
        ApiKey.name,
        ApiKey.prefix,
        ApiKey.created,
        ApiKey.expires,
        ApiKey.revoked,
        ApiKey.last_used,
    ).join(Tenant, Tenant.id == ApiKey.tenant)
    if tenant is not None:
        statement = statement.where(ApiKey.tenant == (await find_tenant(connection, tenant)).id)
    return [KeyView(**row._mapping) for row in await connection.execute(statement.order_by(ApiKey.created))]


async def revoke_key(connection: AsyncConnection, key: str, *, now: datetime) -> None:
    """Revoke a key by its id or by its shown prefix, which must be one key's alone.

    Raises:
        NotFound: none such. Conflict: the prefix is that of several.
    """
    found = (
        await connection.execute(select(ApiKey.id).where((ApiKey.id == key) | (ApiKey.prefix == key)))
    ).scalars()
    identifiers = list(found)
    if not identifiers:
        raise NotFound("there is no such key: `burstline key list` shows each one's id and how it begins")
    if len(identifiers) > 1:
        raise Conflict("several keys begin like this: use the id")
    await connection.execute(
        update(ApiKey).where(ApiKey.id == identifiers[0], ApiKey.revoked.is_(None)).values(revoked=now)
    )


async def list_entries(connection: AsyncConnection, tenant: str, *, limit: int) -> list[EntryView]:
    """A tenant's entries, most recently used first."""
    owner = await find_tenant(connection, tenant)
    holders = (
        select(func.coalesce(func.array_agg(Replica.worker), []))
        .where(Replica.entry == Entry.id)
        .scalar_subquery()
    )
    statement = (
        select(
            Entry.id,
            Entry.key,
            Entry.position,
            Entry.parent_position,
            Entry.state,
            Entry.state_bytes,
            Entry.kv_bytes,
            Entry.hits,
            Entry.last_used,
            holders.label("workers"),
        )
        .where(Entry.tenant == owner.id)
        .order_by(Entry.last_used.desc(), Entry.id)
        .limit(limit)
    )
    return [
        EntryView(**{**row._mapping, "workers": tuple(row.workers)})
        for row in await connection.execute(statement)
    ]


async def withdraw_entries(connection: AsyncConnection, tenant: str) -> int:
    """Take a tenant's live entries out of use: no lookup or lease finds them. Returns how many.

    Their bytes stay charged until the worker frees them: at its next need of room for the tenant, or with its end.
    """
    owner = await find_tenant(connection, tenant)
    await accounts.lock_all(connection, (owner.id,))
    statement = (
        update(Entry)
        .where(Entry.tenant == owner.id, Entry.state == "live")
        .values(state="evicting")
        .returning(Entry.id)
    )
    return len((await connection.execute(statement)).all())


def _check_limits(cache_bytes: int, max_concurrent: int | None) -> None:
    if not 0 <= cache_bytes < 1 << 62:
        raise InvalidRequest("cache bytes must be 0 or more", param="cache_bytes")
    if max_concurrent is not None and not 0 < max_concurrent < 1 << 31:
        raise InvalidRequest("max_concurrent must be 1 or more", param="max_concurrent")
