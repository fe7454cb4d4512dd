"""What the worker uses of the engine: the seam between asyncio and tensors, free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.events import Event
from services.gpu_worker.engine.requests import GenerateRequest, Hit
from services.gpu_worker.engine.stats import EngineStats, Evicted, Pressure


class EngineApi(Protocol):
    """What the worker uses of `engine.Engine`; the contracts are told there."""

    fingerprint: str
    dims: ModelDims

    def lookup(
        self,
        request_id: str,
        root: bytes,
        tokens: Sequence[int],
        chain: Sequence[bytes],
        labels: Sequence[str] = (),
    ) -> Hit | None: ...

    def drop_hit(self, request_id: str) -> None: ...

    def submit(self, request: GenerateRequest) -> None: ...

    def cancel(self, request_id: str, reason: str, choice: int | None = None) -> None: ...

    def interrupt(self) -> None: ...

    def publish(self, capture_id: int) -> bool: ...

    def discard(self, capture_id: int) -> None: ...

    def pressure(self) -> Pressure: ...

    def eviction_candidates(self, blocks_wanted: int, snapshots_wanted: int) -> list[bytes]: ...

    def evict(self, keys: Sequence[bytes]) -> Evicted: ...

    def step(self) -> list[Event]: ...

    def has_work(self) -> bool: ...

    def stats(self) -> EngineStats: ...
