"""The migrations make exactly the schema of the models, from several processes at once."""

from __future__ import annotations

import asyncio

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection

from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database
from services.cache_broker.migrate import migrate
from services.cache_broker.models import Base
from tests.integration.cache_broker.bench import Bench


def _differences(connection: Connection) -> list[object]:
    return list(compare_metadata(MigrationContext.configure(connection), Base.metadata))


async def test_migrations_and_models_are_one_schema(bench: Bench) -> None:
    assert await bench.database.run(lambda c: c.run_sync(_differences)) == []


async def test_several_brokers_may_migrate_at_once(database_url: str) -> None:
    settings = BrokerSettings()
    await asyncio.gather(*(migrate(database_url, settings) for _ in range(4)))
    database = Database(database_url, settings)
    assert await database.run(lambda c: c.run_sync(_differences)) == []
    await database.close()
