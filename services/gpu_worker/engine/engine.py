"""The engine: `step()` plans, runs and answers events. One thread owns it.

It knows tokens, pools and kernels. It does not know queues, HTTP, SQL, text or tenants: a namespace is a chain root.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.gpu_worker.engine.requests import (
    EngineLimits,
    EngineStats,
    Event,
    Evicted,
    GenerateRequest,
    Hit,
    Pressure,
)
from shared.clock import SYSTEM, Clock

if TYPE_CHECKING:
    from services.gpu_worker.engine.config import EngineConfig, ModelDims
    from services.gpu_worker.engine.models.loader import LoadedModel


class Engine:
    """All methods but `cancel` and `interrupt` belong to the owning thread."""

    fingerprint: str
    dims: ModelDims

    def __init__(
        self,
        config: EngineConfig,
        model: Path | LoadedModel,
        *,
        limits: EngineLimits | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        raise NotImplementedError

    def lookup(
        self, request_id: str, root: bytes, tokens: Sequence[int], chain: Sequence[bytes]
    ) -> Hit | None:
        """The deepest entry that prefixes `tokens`, at most len(tokens) - 1 long.

        Takes references once a request id: a second call answers the same. They are released when the request's last
        choice ends, or by `drop_hit`. A request that is submitted without a hit runs cold.
        """
        raise NotImplementedError

    def drop_hit(self, request_id: str) -> None:
        """Give the hit back (the lease was refused, or the request is not submitted). Harmless without one."""
        raise NotImplementedError

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request.

        Errors: ContextLengthExceeded names the largest servable length; InvalidRequest for ids out of the vocabulary,
        a chain that does not fit the tokens or an id in use; Overloaded when the queue is full.
        """
        raise NotImplementedError

    def cancel(self, request_id: str, reason: str) -> None:
        """End every choice of a request at the next chunk or round. Thread-safe; unknown ids are ignored."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """End the current burst at its next round boundary, because new work waits outside. Thread-safe."""
        raise NotImplementedError

    def publish(self, capture_id: int) -> bool:
        """The broker granted: the capture becomes an entry. False: it cannot any more (another came first, or its
        parent is gone), everything it held is released, and the caller takes the grant back."""
        raise NotImplementedError

    def discard(self, capture_id: int) -> None:
        """The broker refused: release what the capture holds. Unknown ids are ignored."""
        raise NotImplementedError

    def pressure(self) -> Pressure:
        """What should be evicted so that waiting work and captures fit; falsy when nothing."""
        raise NotImplementedError

    def eviction_candidates(self, blocks_wanted: int, snapshots_wanted: int) -> list[bytes]:
        """Keys to withdraw at the broker, worst first; takes nothing away. May free less than wanted."""
        raise NotImplementedError

    def evict(self, keys: Sequence[bytes]) -> Evicted:
        """Free entries that the broker let go. Entries in use by now are left and not answered."""
        raise NotImplementedError

    def step(self) -> list[Event]:
        """Admit, prime at most one chunk budget, run one burst. Returns at once with [] when nothing can run."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether `step` could make progress or has something to end."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Pools, queues and counters."""
        raise NotImplementedError
