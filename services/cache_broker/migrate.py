"""Bring a database to this build's schema. Safe from several processes at once, and all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database

FOLDER: Final = Path(__file__).parent / "migrations"
LOCK: Final = 0x6275_7273_746C_696E  # "burstlin": an advisory lock of ours
WAIT_MS: Final = 120_000
"""How long a step may take, and how long a second process waits for the first."""


async def migrate(url: str, settings: BrokerSettings) -> None:
    """Run the migrations that are missing, in one transaction.

    Raises:
        Unavailable: Postgres is away. Overloaded: another process migrates for longer than `WAIT_MS`.
    """
    patient = settings.model_copy(
        update={"statement_timeout_ms": WAIT_MS, "lock_timeout_ms": WAIT_MS, "pool_size": 1}
    )
    database = Database(url, patient, application="burstline-migrate")
    try:
        await database.run(upgrade)
    finally:
        await database.close()


async def upgrade(connection: AsyncConnection) -> None:
    """`migrate` on a connection that is in a transaction."""
    await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
    await connection.run_sync(_upgrade)


def configuration(connection: Connection) -> Config:
    """Alembic's configuration without a file: the scripts lie here, the connection is given."""
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection) -> None:
    command.upgrade(configuration(connection), "head")
