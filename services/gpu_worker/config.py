"""The worker's settings (`BURSTLINE_WORKER_*`). Parsed once; a bad or unknown value stops the process with its name."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig
from services.gpu_worker.engine.limits import BlockWidth, EngineLimits, SpecGate
from shared.config import POCKET, Settings

PREFIX = "BURSTLINE_WORKER_"

BLOCK_FOLDER = "block"
"""Of a model's folder: the drafter that was trained for it."""


class WorkerSettings(Settings):
    """One worker process: one model, one engine, one epoch."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, protected_namespaces=())

    model_folder: Path = POCKET
    model_name: str = Field(default="pocket", min_length=1, max_length=128)
    worker_id: str = Field(
        default_factory=lambda: f"w-{secrets.token_hex(4)}", pattern=r"^[A-Za-z0-9_-]{1,64}$"
    )

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float8"] | None = None
    """Of weights, activations and KV; null = float32 on the CPU, bfloat16 on a card. float8: weights alone."""
    threads: int = Field(default=1, ge=1, le=256)
    num_blocks: int = Field(default=512, ge=0)
    """KV blocks of 64 rows; 0 = as many as the card has room for."""
    num_slots: int = Field(default=8, ge=1)
    num_snapshots: int = Field(default=64, ge=0)
    host_tier_bytes: int = Field(default=0, ge=0)
    """Host memory for cache entries that give way on the device; 0 = they are evicted at once."""
    max_batch: int = Field(default=8, ge=1)
    max_verify: int = Field(default=8, ge=1, le=64)
    max_context: int = Field(default=4096, ge=BLOCK_ROWS)
    prefill_chunk: int = Field(default=512, ge=BLOCK_ROWS)
    burst_rounds: int = Field(default=8, ge=1)
    busy_burst_rounds: int = Field(default=2, ge=1)
    drafter: Literal["auto", "mtp", "block", "ngram", "none"] = "auto"
    """The default of requests that name none; auto: what is measured to be the fastest."""
    drafter_folder: Path | None = None
    """A block drafter of the published layouts; null = `block` in the model's folder, if there is one."""
    speculation_k: int = Field(default=3, ge=0, le=63)
    draft_vocab: int = Field(default=0, ge=0)
    """On a card the MTP head proposes among so many ids from the first on; 0 = among all."""
    spec_low: int = Field(default=2, ge=1)
    """Streams, running and queued, up to which a new one gets a drafter."""
    spec_high: int = Field(default=4, ge=2)
    """From so many on all decode plainly. At least `spec_low` + 1."""
    spec_least_gain: float = Field(default=1.1, ge=0)
    """Over `spec_low`, tokens a second over those of plain decode with which streams speculate in spite of the load, by
    launches timed at the start; 0 = the load alone decides, else more than 1."""
    spec_floor: float = Field(default=1.1, ge=0)
    """Tokens a verify under which a stream's drafter is turned off."""
    spec_floor_rounds: int = Field(default=64, ge=1)
    block_width: BlockWidth = "gate"
    """What the verify width of a block drafter follows: what its drafts have been worth, or one more than stood last."""
    decode_ckpt_blocks: int = Field(default=4, ge=0)
    """Blocks of 64 rows between two checkpoints of a decoding stream, from which it comes back when it was set aside; 0 =
    none are taken."""
    max_decoded: int = Field(default=8, ge=0)
    """Such checkpoints, and finished turns of `reuse = "decode"`, that are kept: at most, and a quarter of the snapshots."""

    max_running: int = Field(default=8, ge=1, le=1024)
    """Requests that are claimed at once, and at most as many again that are the first of a tenant which has nothing here; the rest
    wait in the queue, where another worker may take them."""
    max_attempts: int = Field(default=3, ge=1)
    """Claims in a row without an end and without a token after which a request counts as poison; those that were handed back do
    not count."""

    ack_wait_s: float = Field(default=15.0, gt=0)
    stall_limit_s: float = Field(default=60.0, gt=0)
    heartbeat_s: float = Field(default=2.0, gt=0)
    pull_wait_s: float = Field(default=1.0, gt=0)
    """A long poll, of those that stand while nothing is known to wait."""
    queue_look_s: float = Field(default=0.4, gt=0)
    """Between two looks at what is in the queues: redeliveries are found so, and what another worker leaves."""
    adopt_after_s: float = Field(default=30.0, gt=0)
    """No worker of another fingerprint heard for so long: its requests of our model are taken over, not exactly."""
    drain_limit_s: float = Field(default=25.0, ge=0)
    journal_patience_s: float = Field(default=30.0, gt=0)
    """How long a claim outlives an unreachable journal before the request is left to another worker."""
    frame_interval_s: float = Field(default=0.05, ge=0)
    """Least time between two frames of one stream while more than `pace_above` requests run."""
    pace_above: int = Field(default=4, ge=0)

    broker_timeout_s: float = Field(default=1.0, gt=0)
    broker_cooldown_s: float = Field(default=2.0, ge=0)
    """How long captures are given up at once after the broker did not answer."""
    lease_ttl_s: int = Field(default=30, ge=1)
    publish_wait_s: float = Field(default=1.0, ge=0)
    """How long a terminal waits for the request's captures, so that the next turn finds them."""

    health_host: str = "127.0.0.1"
    health_port: int = Field(default=0, ge=0, le=65535)
    """0 = no health server."""

    @field_validator("prefill_chunk")
    @classmethod
    def _on_grid(cls, value: int) -> int:
        if value % BLOCK_ROWS:
            raise ValueError(f"must be a multiple of {BLOCK_ROWS}")
        return value

    @model_validator(mode="after")
    def _fits(self) -> WorkerSettings:
        if self.max_batch > self.num_slots:
            raise ValueError("max_batch must not exceed num_slots")
        if self.speculation_k >= self.max_verify:
            raise ValueError("speculation_k must be less than max_verify")
        if self.spec_high < self.spec_low + 1:
            raise ValueError("spec_high must be at least spec_low + 1")
        if 0 < self.spec_least_gain <= 1:
            raise ValueError("spec_least_gain must be over 1, or 0")
        if self.num_blocks < 2 and (self.num_blocks or self.device == "cpu"):
            raise ValueError("num_blocks must be at least 2; 0 = what fits, on a card")
        if self.num_blocks and self.max_context > self.num_blocks * BLOCK_ROWS:
            raise ValueError(f"max_context must fit num_blocks * {BLOCK_ROWS}")
        return self

    @property
    def block_folder(self) -> Path | None:
        """Where the block drafter is; null = there is none."""
        own = self.model_folder / BLOCK_FOLDER
        return self.drafter_folder or (own if (own / "model.safetensors").exists() else None)

    @property
    def max_drafts(self) -> int:
        """Most drafts a round: a request may ask for more, or for another drafter, than this worker's default."""
        return 0 if self.drafter == "none" else self.max_verify - 1

    def engine_config(self) -> EngineConfig:
        """Sizes of the engine's pools and launches."""
        return EngineConfig(
            num_blocks=self.num_blocks,
            num_slots=self.num_slots,
            num_snapshots=self.num_snapshots,
            host_tier_bytes=self.host_tier_bytes,
            max_verify=self.max_verify,
            max_batch=self.max_batch,
            prefill_chunk=self.prefill_chunk,
            threads=self.threads,
            device=self.device,
            dtype=self.dtype,
            draft_vocab=self.draft_vocab,
            drafter_folder=str(self.block_folder) if self.block_folder is not None else None,
            max_context=self.max_context,
        )

    def engine_limits(self) -> EngineLimits:
        """The engine's queue holds every choice of every claimed request: 128 choices are the gateway's most."""
        return EngineLimits(
            max_waiting=2 * self.max_running * 128,
            burst_rounds=self.burst_rounds,
            busy_burst_rounds=self.busy_burst_rounds,
            spec_gate=SpecGate(
                low=self.spec_low, high=self.spec_high, least_gain=self.spec_least_gain or None
            ),
            floor=self.spec_floor,
            floor_rounds=self.spec_floor_rounds,
            block_width=self.block_width,
            decode_ckpt_blocks=self.decode_ckpt_blocks,
            max_decoded=self.max_decoded,
        )
