"""What the parts of one worker share: who it is, and the things that it stands on."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from services.gpu_worker.broker import BrokerClient
from services.gpu_worker.config import WorkerSettings
from services.gpu_worker.grammars import Grammars
from services.gpu_worker.host import EngineHost
from services.gpu_worker.metrics import WorkerMetrics
from shared.clock import Clock
from shared.storing import StoreHealth
from shared.telemetry import Telemetry
from shared.transport.base import Transport


@dataclass(kw_only=True)
class Identity:
    """`epoch` is new at every start, and after the broker declared it over: what an older epoch held is gone."""

    worker_id: str
    epoch: str
    model: str
    fingerprint: str

    def begin_epoch(self) -> None:
        """From now on this worker speaks as one that holds nothing."""
        self.epoch = new_epoch()


def new_epoch() -> str:
    """An epoch that no worker ever had."""
    return secrets.token_hex(8)


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
    storing: StoreHealth
    grammars: Grammars
    clock: Clock
    max_drafts: int
    """Most drafts a round here, 0 = none at all. Changes the speed and never the tokens (C1)."""
