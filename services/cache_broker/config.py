"""Settings of the broker (`BURSTLINE_BROKER_…`). The database URL is common: administration reads it too."""

from __future__ import annotations

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from shared.config import Settings


class BrokerSettings(Settings):
    """Every limit of the process; all times bounded."""

    model_config = SettingsConfigDict(env_prefix="BURSTLINE_BROKER_")

    concurrency: int = Field(default=16, ge=1, le=256)  # calls answered at once, each operation
    pool_size: int = Field(default=8, ge=1, le=100)  # Postgres connections
    pool_timeout_s: float = Field(default=2.0, gt=0, le=60)  # wait for a free one
    connect_timeout_s: float = Field(default=3.0, gt=0, le=60)
    statement_timeout_ms: int = Field(default=3000, ge=100, le=60_000)
    lock_timeout_ms: int = Field(default=2000, ge=50, le=60_000)
    alive_after_s: float = Field(default=10.0, gt=0)  # without a heartbeat: no lookups lead there
    reap_after_s: float = Field(default=60.0, gt=0)  # without a heartbeat: its entries are gone
    reservation_ttl_s: float = Field(default=60.0, gt=0)
    max_lease_ttl_s: int = Field(default=120, ge=1)
    sweep_interval_s: float = Field(default=5.0, gt=0)
    journal_grace_s: float = Field(
        default=900.0, gt=0
    )  # a request's tokens can be read so long after its end
    idempotency_s: float = Field(default=840.0, gt=0)  # a finished request is replayed to its key for so long
    ledger_retention_s: float = Field(default=7 * 24 * 3600.0, gt=0)  # history of entries that are gone
    health_host: str = "127.0.0.1"
    health_port: int = Field(default=0, ge=0, le=65535)  # 0 = a free one, logged
    call_timeout_s: float = Field(default=6.0, gt=0, le=60)  # a whole call, waiting for a connection included
    start_timeout_s: float = Field(default=60.0, gt=0)  # wait for Postgres at the start
    drain_timeout_s: float = Field(default=10.0, gt=0)

    @model_validator(mode="after")
    def _tokens_outlive_keys(self) -> BrokerSettings:
        if self.idempotency_s >= self.journal_grace_s:
            raise ValueError(
                "idempotency_s must be less than journal_grace_s: the tokens are replayed from the journal"
            )
        return self
