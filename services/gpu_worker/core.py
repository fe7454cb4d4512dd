"""What the parts of one worker share: who it is, and the things that it stands on."""

from __future__ import annotations

from dataclasses import dataclass

from services.gpu_worker.broker import BrokerClient
from services.gpu_worker.config import WorkerSettings
from services.gpu_worker.host import EngineHost
from services.gpu_worker.metrics import WorkerMetrics
from shared.clock import Clock
from shared.telemetry import Telemetry
from shared.transport.base import Transport


@dataclass(frozen=True, kw_only=True)
class Identity:
    """`epoch` is new at every start: what an older epoch held is gone."""

    worker_id: str
    epoch: str
    model: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Core:
    """Built once by the application; no part of it is replaced."""

    settings: WorkerSettings
    identity: Identity
    transport: Transport
    telemetry: Telemetry
    host: EngineHost
    broker: BrokerClient
    metrics: WorkerMetrics
    clock: Clock
    max_drafts: int
    """Most drafts a round here, 0 = none at all. Changes the speed and never the tokens (C1)."""
