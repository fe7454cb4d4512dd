"""Settings of the gateway (`BURSTLINE_GATEWAY_…`), with every limit that a caller can run into.

The limits are published by `GET /v1/limits`, so that nobody has to find them by being refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from services.gateway.body import BodyLimits
from shared.config import POCKET, Settings


class GatewaySettings(Settings):
    """Where the gateway listens, which models it speaks for, and what it accepts."""

    model_config = SettingsConfigDict(env_prefix="BURSTLINE_GATEWAY_")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    models: Annotated[tuple[str, ...], NoDecode] = (f"pocket={POCKET}",)
    """Comma-separated model folders, each as `folder` (its last part is the name) or `name=folder`."""

    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    body_timeout_s: float = Field(default=30.0, gt=0)
    max_nesting: int = Field(default=64, ge=8, le=500)
    max_containers: int = Field(default=50_000, ge=1)
    """Objects and arrays of a body, in all."""
    max_keys: int = Field(default=4096, ge=1)
    """Keys of one object of a body."""
    max_messages: int = Field(default=2048, ge=1)
    max_tools: int = Field(default=128, ge=0)
    max_choices: int = Field(default=8, ge=1, le=64)
    max_prompts: int = Field(default=16, ge=1, le=64)
    max_logprobs: int = Field(default=20, ge=0, le=20)
    max_stop: int = Field(default=16, ge=0)
    max_stop_characters: int = Field(default=256, ge=1)
    max_stop_ids: int = Field(default=64, ge=0)
    max_logit_bias: int = Field(default=1024, ge=0)
    max_allowed_ids: int = Field(default=1024, ge=0)
    max_schema_bytes: int = Field(default=64 << 10, ge=256)
    """JSON schemas of a request, in all: of `response_format` and of strict tools."""
    max_speculation: int = Field(default=16, ge=0)
    max_rendered_characters: int = Field(default=4 << 20, ge=1024)
    default_max_tokens: int = Field(default=4096, ge=1)
    """What an absent max_tokens becomes, or what is left of the window if that is less."""

    keep_alive_s: float = Field(default=10.0, gt=0)
    request_deadline_s: float = Field(default=600.0, gt=0)
    queue_deadline_s: float = Field(default=60.0, gt=0)
    quiet_s: float = Field(default=2.0, gt=0)
    """A stream without a live frame for this long is checked against the journal."""
    journal_stuck_s: float = Field(default=60.0, gt=0)
    """A worker whose messages are heard for this long and never stored: the request ends with an error."""
    terminal_wait_s: float = Field(default=2.0, gt=0)
    """After a stop string: how long to wait for the worker's terminal, which holds the telemetry."""
    linger_s: float = Field(default=30.0, ge=0)
    """How long a request with an Idempotency-Key runs on without a reader before it is cancelled."""
    broker_timeout_s: float = Field(default=3.0, gt=0)
    lookup_timeout_s: float = Field(default=0.3, gt=0)
    no_worker_grace_s: float = Field(default=2.5, ge=0)
    """How long a request may wait for a first live worker of its model before it is refused; over a heartbeat."""
    worker_silence_s: float = Field(default=10.0, gt=0)
    """A worker without a heartbeat for this long is dead for routing."""
    orphan_grace_s: float = Field(default=30.0, ge=0)
    """After the last worker of a request's fingerprint fell silent: how long one may take to come back, before the
    request ends with an error. Over a worker's start."""
    worker_max_waiting: int = Field(default=4, ge=0)
    """A worker with more waiting requests than this is passed over, though it holds the entry."""
    auth_cache_s: float = Field(default=30.0, ge=0)
    auth_negative_cache_s: float = Field(default=3.0, ge=0)
    auth_cache_entries: int = Field(default=10_000, ge=1)
    max_in_flight: int = Field(default=1024, ge=1)
    max_in_flight_per_tenant: int = Field(default=512, ge=1)
    """Of one tenant, whatever it is allowed by itself: no tenant takes all of a gateway."""
    max_prompt_bytes: int = Field(default=8 << 20, ge=4096)
    """Of a prompt's packed ids, 4 bytes a token. What is too large for one message goes by claim check."""
    max_queued_per_model: int = Field(default=4096, ge=1)
    """Requests of a model in the queue, claimed ones included, at all gateways."""
    max_queued_per_tenant: int = Field(default=1024, ge=1)
    queue_look_s: float = Field(default=1.0, gt=0)
    """Between two looks at how much is in the queue."""
    tokenizer_threads: int = Field(default=2, ge=1, le=64)
    render_timeout_s: float = Field(default=5.0, gt=0)
    drain_notice_s: float = Field(default=0.5, ge=0)
    """Between failing readiness and closing the listener: a balancer's time to notice."""
    drain_s: float = Field(default=30.0, ge=0)
    """What running requests get after that."""

    @field_validator("models", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    def model_folders(self) -> dict[str, Path]:
        """Model name -> folder, as `models` says."""
        folders: dict[str, Path] = {}
        for item in self.models:
            name, equals, folder = item.partition("=")
            path = Path(folder if equals else name).expanduser()
            folders[name if equals else path.name] = path
        return folders

    def body_limits(self) -> BodyLimits:
        """What a request's body may be."""
        return BodyLimits(
            size=self.max_body_bytes,
            depth=self.max_nesting,
            containers=self.max_containers,
            keys=self.max_keys,
            time_s=self.body_timeout_s,
        )

    def limits(self) -> dict[str, int | float]:
        """What `GET /v1/limits` shows. Units stand in the names."""
        names = (
            "max_body_bytes", "body_timeout_s", "max_nesting", "max_containers", "max_keys", "max_messages", "max_tools",
            "max_choices", "max_prompts", "max_logprobs", "max_stop", "max_stop_characters", "max_stop_ids", "max_logit_bias",
            "max_allowed_ids", "max_speculation", "max_schema_bytes", "default_max_tokens", "keep_alive_s",
            "request_deadline_s", "queue_deadline_s", "linger_s", "max_prompt_bytes", "max_in_flight",
            "max_in_flight_per_tenant", "max_queued_per_model", "max_queued_per_tenant",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}
