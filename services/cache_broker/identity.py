"""Who a key stands for."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker.models import ApiKey, Quota, Tenant
from shared.errors import Unauthenticated
from shared.protocol.messages import Identity

LAST_USED_EVERY: Final = timedelta(minutes=1)
"""A busy key would else make every authentication a write to one row."""


async def authenticate(connection: AsyncConnection, key_digest: str, *, now: datetime) -> Identity:
    """The identity of a key, by its SHA-256 in hex.

    Raises:
        Unauthenticated: unknown, expired or revoked, or the tenant is disabled; which of them is not said.
    """
    statement = (
        select(
            ApiKey.id,
            ApiKey.tenant,
            ApiKey.expires,
            ApiKey.revoked,
            ApiKey.last_used,
            Tenant.disabled,
            Quota.max_concurrent,
        )
        .join(Tenant, Tenant.id == ApiKey.tenant)
        .join(Quota, Quota.tenant == ApiKey.tenant)
        .where(ApiKey.digest == key_digest)
    )
    key = (await connection.execute(statement)).one_or_none()
    if key is None or key.revoked or key.disabled or (key.expires is not None and key.expires <= now):
        raise Unauthenticated("The API key is not valid.")
    if key.last_used is None or now - key.last_used >= LAST_USED_EVERY:
        await connection.execute(update(ApiKey).where(ApiKey.id == key.id).values(last_used=now))
    return Identity(
        failure=None, tenant=key.tenant, key_id=key.id, models=(), max_concurrent=key.max_concurrent
    )
