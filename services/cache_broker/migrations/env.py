"""Run by Alembic: migrate on the connection that `migrate.configuration` was given, inside its transaction."""

from __future__ import annotations

from alembic import context

from services.cache_broker.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    compare_type=True,
)
context.run_migrations()
