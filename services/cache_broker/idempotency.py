"""Which request a caller's Idempotency-Key stands for.

    free ──remember──> runs (until the deadline and `idempotency_s` more) ──ended well──> replayed for `idempotency_s` ──> free
                         └── failed, cancelled, never enqueued ──> free

One insert decides: of two requests with one key, whichever gateways they reach, one is new and the other is told so. The
tokens of the finished one are read from its journal, which is cut after `journal_grace_s`: later than the key expires.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import Row, delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker.models import IdempotencyKey
from shared.errors import Conflict, InvalidRequest, NotFound
from shared.protocol.messages import Find, Forget, Recall, Remember, Remembered, Terminal

MAX_SHEET_BYTES: Final = 256 << 10
LONGEST: Final = timedelta(hours=24)
"""No key is bound for longer while its request has not ended."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


async def remember(
    connection: AsyncConnection, call: Remember, *, now: datetime, window: timedelta
) -> Remembered:
    """Bind the key, or tell what it is bound to.

    Raises:
        Conflict: `idempotency_key_reused`, it stands for another body.
        InvalidRequest: no digests, or a sheet that is too large.
    """
    _check(call.key, call.body)
    if len(call.sheet) > MAX_SHEET_BYTES:
        raise InvalidRequest(f"a sheet has at most {MAX_SHEET_BYTES} bytes", param="sheet")
    mine = (IdempotencyKey.tenant == call.tenant, IdempotencyKey.key == call.key)
    await connection.execute(delete(IdempotencyKey).where(*mine, IdempotencyKey.expires <= now))
    expires = min(datetime.fromtimestamp(call.deadline_ns / 1e9, UTC) + window, now + LONGEST)
    statement = (
        insert(IdempotencyKey)
        .values(
            tenant=call.tenant,
            key=call.key,
            body=call.body,
            request=call.request_id,
            sheet=call.sheet,
            expires=expires,
        )
        .on_conflict_do_nothing()
        .returning(IdempotencyKey.request)
    )
    if (await connection.execute(statement)).one_or_none() is not None:
        return Remembered(failure=None, request_id=call.request_id, sheet=call.sheet, new=True)
    found = await recall(connection, Recall(tenant=call.tenant, key=call.key, body=call.body), now=now)
    if found.request_id is None:
        raise Conflict("the request id is bound to another key")
    return found


async def recall(connection: AsyncConnection, call: Recall, *, now: datetime) -> Remembered:
    """What the key is bound to; nothing once it expired. Raises as `remember`."""
    _check(call.key, call.body)
    row = await _one(
        connection,
        IdempotencyKey.tenant == call.tenant,
        IdempotencyKey.key == call.key,
        IdempotencyKey.expires > now,
    )
    if row is None:
        return Remembered(failure=None, request_id=None, sheet=b"", new=False)
    if row.body != call.body:
        raise Conflict("this Idempotency-Key was used for another request", code="idempotency_key_reused")
    return Remembered(failure=None, request_id=row.request, sheet=row.sheet, new=False)


async def find(connection: AsyncConnection, call: Find, *, now: datetime) -> Remembered:
    """A request of the tenant by its id. Raises NotFound, for another tenant's too."""
    row = await _one(
        connection,
        IdempotencyKey.tenant == call.tenant,
        IdempotencyKey.request == call.request_id,
        IdempotencyKey.expires > now,
    )
    if row is None:
        raise NotFound("there is no such stream, or not any more")
    return Remembered(failure=None, request_id=row.request, sheet=row.sheet, new=False)


async def forget(connection: AsyncConnection, call: Forget) -> None:
    """Free the key of a request that was never enqueued."""
    await connection.execute(
        delete(IdempotencyKey).where(
            IdempotencyKey.tenant == call.tenant, IdempotencyKey.request == call.request_id
        )
    )


async def ended(connection: AsyncConnection, terminals: Sequence[Terminal], *, window: timedelta) -> None:
    """Requests ended: those that ended well can be replayed for `window`, the others free their keys."""
    for terminal in terminals:
        mine = IdempotencyKey.request == terminal.request_id
        if terminal.failure is None and terminal.cancel_reason in (None, "stop_string"):
            until = datetime.fromtimestamp(terminal.at_ns / 1e9, UTC) + window
            await connection.execute(update(IdempotencyKey).where(mine).values(expires=until))
        else:
            await connection.execute(delete(IdempotencyKey).where(mine))


async def expire(connection: AsyncConnection, now: datetime) -> int:
    """Delete what expired. Returns how many."""
    statement = delete(IdempotencyKey).where(IdempotencyKey.expires <= now).returning(IdempotencyKey.request)
    return len((await connection.execute(statement)).all())


async def _one(connection: AsyncConnection, *conditions: Any) -> Row[*tuple[Any, ...]] | None:
    statement = select(IdempotencyKey.body, IdempotencyKey.request, IdempotencyKey.sheet).where(*conditions)
    return (await connection.execute(statement)).one_or_none()


def _check(*digests: str) -> None:
    if not all(_DIGEST.fullmatch(digest) for digest in digests):
        raise InvalidRequest("a digest has 64 hex digits")
