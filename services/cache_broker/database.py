"""The pool, the one place that commits, and the translation of the driver's errors into ours.

A unit of work is a function of one connection. It runs in a task of its own, shielded from the caller's cancellation
(FR-112: a task cancelled inside a query leaks its connection, with row locks held), and is bounded by the server's
statement and lock time-outs instead. Connections are never shared, are tested before use, and are thrown away after a
broken one (FR-114), so that the broker outlives a restart of Postgres.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import asyncpg
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from services.cache_broker.config import BrokerSettings
from shared.errors import BurstlineError, Overloaded, Unavailable

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]

_log = logging.getLogger(__name__)

_DIALECT: Final = "postgresql+asyncpg://"
_BUSY: Final = ("55P03", "57014")  # lock_not_available, query_canceled (a time-out)
_RETRY: Final = ("40001", "40P01")  # serialization_failure, deadlock_detected: rolled back whole
_AWAY: Final = ("08", "57P", "53")  # connection, operator intervention, insufficient resources
_ATTEMPTS: Final = 3
_ERRORS: Final = (SQLAlchemyError, OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)
"""What a database call can raise; a failed connect comes bare from asyncpg or the socket."""


class Database:
    """Postgres, as the broker uses it."""

    def __init__(self, url: str, settings: BrokerSettings, *, application: str = "burstline-broker") -> None:
        connect = _connector(driver_url(url), settings, application)
        self.engine: AsyncEngine = create_async_engine(
            _DIALECT,
            pool_size=settings.pool_size,
            max_overflow=0,
            pool_timeout=settings.pool_timeout_s,
            pool_pre_ping=True,
            pool_recycle=1800,
            async_creator=connect,
        )
        # The probe has connections of its own, so that a full pool is not taken for an outage (FR-116).
        self._probe: AsyncEngine = create_async_engine(_DIALECT, poolclass=NullPool, async_creator=connect)
        self._running: set[asyncio.Task[object]] = set()

    async def run(self, work: Work[T]) -> T:
        """Do `work` in one transaction: committed when it returns, rolled back when it raises.

        `work` may run again after a deadlock, so it has no effects but SQL. A cancelled caller leaves at once; the
        transaction goes on to its end.

        Raises:
            Unavailable: Postgres is away, or whether the commit happened is not known.
            Overloaded: no free connection or lock in time.
        """
        task: asyncio.Task[T] = asyncio.create_task(self._attempts(work))
        self._running.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for what runs (bounded by its time-outs), then close the pool."""
        if self._running:
            await asyncio.wait(self._running)
        await self.engine.dispose()
        await self._probe.dispose()

    async def ready(self) -> bool:
        """Whether a query succeeds now."""
        try:
            async with self._probe.connect() as connection:
                await connection.execute(text("SELECT 1"))
        except _ERRORS:
            return False
        return True

    def _finished(self, task: asyncio.Task[T]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen here too: a caller that left does not ask for it

    async def _attempts(self, work: Work[T]) -> T:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with self.engine.begin() as connection:
                    return await work(connection)
            except DBAPIError as error:
                if sqlstate(error) in _RETRY and attempt < _ATTEMPTS:
                    continue
                raise translate(error) from error
            except _ERRORS as error:
                raise translate(error) from error
        raise AssertionError("unreachable")  # the last attempt returns or raises


def _connector(
    url: str, settings: BrokerSettings, application: str
) -> Callable[[], Awaitable[asyncpg.Connection]]:
    """What opens a connection. The driver reads the URL itself: SQLAlchemy passes none of libpq's words for TLS on."""

    async def connect() -> asyncpg.Connection:
        return await asyncpg.connect(
            url,
            timeout=settings.connect_timeout_s,
            # The client's own limit: a server that hangs does not send its time-out.
            command_timeout=settings.statement_timeout_ms / 1000 + 5,
            server_settings={
                "application_name": application,
                "statement_timeout": str(settings.statement_timeout_ms),
                "lock_timeout": str(settings.lock_timeout_ms),
                "idle_in_transaction_session_timeout": str(settings.statement_timeout_ms * 4),
                "timezone": "UTC",
            },
        )

    return connect


def driver_url(url: str) -> str:
    """The URL as the driver reads it (libpq's words: `sslmode`, `sslrootcert`, ...), whichever usual spelling was given."""
    scheme, separator, rest = url.partition("://")
    if scheme in ("postgresql", "postgres", "postgresql+asyncpg") and separator:
        return f"postgresql://{rest}"
    raise Unavailable("the database URL must begin with postgresql://", code="database_unavailable")


def sqlstate(error: BaseException) -> str:
    """The five-character state of a driver's error, "" without one."""
    original = getattr(error, "orig", error)
    return str(getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or "")


def translate(error: BaseException) -> BurstlineError:
    """Our error for one of SQLAlchemy's or asyncpg's. The text of statements and parameters stays behind."""
    state = sqlstate(error)
    if isinstance(error, PoolTimeout) or state in _BUSY:
        return Overloaded("the database is busy", code="database_busy")
    if isinstance(error, ssl.SSLError):
        return Unavailable(f"the database's TLS fails: {error.reason}", code="database_unavailable")
    broken = isinstance(error, DBAPIError) and error.connection_invalidated
    if (
        broken
        or state.startswith(_AWAY)
        or isinstance(error, OSError | TimeoutError | asyncpg.InterfaceError)
    ):
        return Unavailable("the database is away", code="database_unavailable")
    if isinstance(error, DBAPIError) and isinstance(getattr(error, "orig", None), OSError | TimeoutError):
        return Unavailable("the database is away", code="database_unavailable")
    return BurstlineError(
        f"the database refused a statement (state {state or 'unknown'})", code="database_error"
    )
