"""The broker as a process: connect, migrate, serve, and drain on a signal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database
from services.cache_broker.handlers import Handlers
from services.cache_broker.hearing import Hearing
from services.cache_broker.journals import Journals
from services.cache_broker.migrate import migrate
from services.cache_broker.server import hear, serve
from services.cache_broker.settle import Settler
from services.cache_broker.sweeper import Sweeper
from services.cache_broker.tracing import instrument
from shared.clock import SYSTEM, Clock
from shared.config import CommonSettings
from shared.errors import Unavailable
from shared.health import serve_health
from shared.lifecycle import Drain, Shutdown, Supervisor, drain_on_signals
from shared.protocol import subjects
from shared.telemetry import Telemetry, setup
from shared.transport.access import Access
from shared.transport.base import Transport
from shared.transport.nats import connect

RETRY_S = 0.5

_log = logging.getLogger(__name__)


async def run(settings: BrokerSettings, common: CommonSettings) -> None:
    """Serve until a signal.

    Raises:
        Unavailable: Postgres or NATS did not answer in time at the start.
        TaskDied: a background task ended; a supervisor should start the process again.
    """
    if common.database_url is None:
        raise Unavailable("BURSTLINE_DATABASE_URL must be set", code="database_unavailable")
    url = common.database_url.get_secret_value()
    telemetry = setup("broker", common)
    async with drain_on_signals() as drain, Shutdown() as shutdown:
        shutdown.push("telemetry", lambda: asyncio.to_thread(telemetry.shutdown))
        await migrate_patiently(url, settings, drain)
        database = Database(url, settings)
        shutdown.push("database", database.close, limit_s=settings.drain_timeout_s)
        transport = await connect(common.nats_url, name="burstline-broker", access=Access.of(common))
        shutdown.push("transport", transport.close)
        async with serving(transport, database, telemetry, settings):
            await _healthy(transport, database, telemetry, settings, drain)


@asynccontextmanager
async def serving(
    transport: Transport,
    database: Database,
    telemetry: Telemetry,
    settings: BrokerSettings,
    clock: Clock = SYSTEM,
) -> AsyncIterator[Handlers]:
    """Answer calls and do the background work while the block runs. The database is migrated.

    Leaving takes no more calls, lets those that run end, and stops the rest.
    """
    instrument(database.engine, telemetry)
    hearing = Hearing(settings, clock)
    handlers = Handlers(database, settings, clock, telemetry.registry, hearing)
    sweeper = Sweeper(database, settings, clock, telemetry.registry, hearing)
    journals = Journals(transport, clock, telemetry.registry, grace_s=settings.journal_grace_s)
    settler = Settler(database, telemetry.registry, ended=journals.ended, replay_s=settings.idempotency_s)
    for spec in (subjects.JOURNAL, subjects.CANCELS):
        await transport.ensure_stream(spec)
    terminals = await transport.ensure_consumer(subjects.settle_consumer())
    async with Shutdown() as shutdown, Supervisor() as tasks:
        heartbeats = await transport.subscribe(subjects.HEARTBEATS)
        shutdown.push("heartbeats", heartbeats.close)
        for served in await serve(transport, handlers, telemetry, concurrency=settings.concurrency):
            shutdown.push("calls", served.close, limit_s=settings.drain_timeout_s)
        tasks.spawn("heartbeats", hear(heartbeats, database, clock, new_epoch=sweeper.drop_orphans))
        tasks.spawn("settle", settler.run(terminals))
        tasks.spawn("journals", journals.run())
        tasks.spawn("sweep", sweeper.run(transport))
        yield handlers


async def migrate_patiently(url: str, settings: BrokerSettings, drain: Drain) -> None:
    """Migrate; while Postgres is away try again, for `start_timeout_s` at most; the wait is told once. Raises Unavailable."""
    deadline = asyncio.get_running_loop().time() + settings.start_timeout_s
    told = False
    while True:
        try:
            await migrate(url, settings)
            return
        except Unavailable as error:
            if drain.begun or asyncio.get_running_loop().time() > deadline:
                raise Unavailable(
                    f"no database: {error.message}. BURSTLINE_DATABASE_URL says where it is", code=error.code
                ) from error
            if not told:
                _log.warning(
                    "waiting for the database, for %g s at most: %s", settings.start_timeout_s, error.message
                )
                told = True
            await asyncio.sleep(RETRY_S)


async def _healthy(
    transport: Transport, database: Database, telemetry: Telemetry, settings: BrokerSettings, drain: Drain
) -> None:
    async def postgres() -> str | None:
        return None if await database.ready() else "Postgres does not answer"

    async def nats() -> str | None:
        return None if await transport.ready() else "NATS does not answer"

    async def draining() -> str | None:
        return drain.reason if drain.begun else None

    checks = {"postgres": postgres, "nats": nats, "draining": draining}
    async with serve_health(
        settings.health_port, checks, telemetry.registry, host=settings.health_host
    ) as port:
        _log.info("the broker serves; health on http://%s:%d", settings.health_host, port)
        await drain.wait()
