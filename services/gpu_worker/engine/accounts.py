"""The engine's books: totals over its life, and one consistent picture between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.gpu_worker.engine.affinity import AffinityPool
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.events import SpecTelemetry
from services.gpu_worker.engine.line import Line
from services.gpu_worker.engine.stats import EngineStats
from services.gpu_worker.engine.streams import Stream


class Counters:
    """Totals over the engine's life; streams that ended are added, running ones read on demand."""

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.set_aside = 0
        self.preempted = 0
        self._ended = SpecTelemetry()

    def add(self, telemetry: SpecTelemetry) -> None:
        """Count a stream that ended."""
        self._ended = _sum((self._ended, telemetry))

    def with_live(self, running: Iterable[SpecTelemetry]) -> SpecTelemetry:
        """Ended and running streams together."""
        return _sum((self._ended, *running))


def _sum(parts: Iterable[SpecTelemetry]) -> SpecTelemetry:
    parts = list(parts)
    return SpecTelemetry(
        rounds=sum(part.rounds for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        replayed=sum(part.replayed for part in parts),
        capture_failures=sum(part.capture_failures for part in parts),
    )


def picture(
    cache: CacheManager,
    line: Line,
    active: Sequence[Stream],
    counters: Counters,
    affinity: AffinityPool,
) -> EngineStats:
    """Pools, queues and counters as they stand."""
    blocks, slots, snapshots = cache.counts()
    priming = sum(1 for stream in active if not stream.session.primed)
    total = counters.with_live([*(stream.session.telemetry() for stream in active), *line.telemetry()])
    return EngineStats(
        blocks=blocks,
        slots=slots,
        snapshots=snapshots,
        waiting=len(line),
        priming=priming,
        decoding=len(active) - priming,
        pending_captures=cache.pending,
        entries=sum(1 for entry in cache.tree.entries() if entry.published),
        rounds=total.rounds,
        drafted=total.drafted,
        accepted=total.accepted,
        replayed=total.replayed,
        capture_failures=cache.capture_failures,
        prefill_tokens=counters.prefill_tokens,
        decode_tokens=counters.decode_tokens,
        speculating=sum(1 for stream in active if stream.speculating),
        set_aside=counters.set_aside,
        preempted=counters.preempted,
        affinity=affinity.counts(),
        decoded=cache.decoded.counts(),
        host_bytes=cache.tier.used,
        spilled=cache.tier.taken,
        brought_back=cache.tier.brought,
        mismatches=cache.tier.mismatches,
    )
