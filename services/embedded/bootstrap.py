"""A first tenant and its key, so that a new stack can be used at once."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker import admin, identity
from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database
from services.embedded.files import write_private
from shared.clock import SYSTEM
from shared.config import load
from shared.errors import NotFound, Unauthenticated


def ensure_key(folder: Path, database_url: str, tenant: str) -> str:
    """A working key of `tenant`, made with the tenant if need be, and kept in `<folder>/keys/<tenant>` (0600).

    A kept key that this database does not know (another database, revoked, expired) is replaced. The broker has
    migrated the database before.

    Raises:
        BurstlineError: the database is away or refuses.
    """
    path = folder / "keys" / tenant
    kept = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    key = asyncio.run(_ensure(database_url, tenant, kept))
    if key != kept:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(path, key)
    return key


async def _ensure(database_url: str, tenant: str, kept: str) -> str:
    database = Database(database_url, load(BrokerSettings), application="burstline-embedded")
    try:
        return await database.run(lambda connection: _key(connection, tenant, kept))
    finally:
        await database.close()


async def _key(connection: AsyncConnection, tenant: str, kept: str) -> str:
    now = SYSTEM.now()
    try:
        await admin.find_tenant(connection, tenant)
    except NotFound:
        await admin.create_tenant(connection, tenant, now=now)
    if kept:
        with contextlib.suppress(Unauthenticated):
            await identity.authenticate(connection, admin.digest(kept), now=now)
            return kept
    return (await admin.create_key(connection, tenant, now=now, name="embedded")).key
