"""Settings of the embedded stack (`BURSTLINE_EMBEDDED_…`).

A service's own settings (`BURSTLINE_GATEWAY_…`, `BURSTLINE_WORKER_…`, `BURSTLINE_BROKER_…`) are passed on to it; the
stack sets only what ties the services together.
"""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from shared.config import Settings


class EmbeddedSettings(Settings):
    """One supervisor and what it waits for."""

    model_config = SettingsConfigDict(env_prefix="BURSTLINE_EMBEDDED_")

    gateway_port: int = Field(default=8000, ge=0, le=65535)
    """Where the gateway listens on 127.0.0.1; 0 = any free port."""
    tenant: str = Field(default="demo", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """A tenant with this name and one key are made at the first start."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """How long a service may take until it is ready; slow cores load torch for half a minute."""
    restart_limit: int = Field(default=5, ge=0, le=1000)
    """Restarts of one service within `restart_window_s` after which the whole stack gives up."""
    restart_window_s: float = Field(default=300.0, gt=0)
    restart_backoff_s: float = Field(default=0.5, ge=0)
    """Delay before the first restart; it doubles with each further one, up to `restart_backoff_limit_s`."""
    restart_backoff_limit_s: float = Field(default=15.0, ge=0)
    drain_timeout_s: float = Field(default=40.0, gt=0)
    """How long each service may take to finish what it began, before it is killed."""
    durable: bool = True
    """Whether Postgres waits for the disk at each commit. Off only for tests."""
