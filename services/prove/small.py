"""The engines that trials run: pools for a few streams, and limits under which drafts are made whatever they cost."""

from __future__ import annotations

from typing import Any, Final

from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig
from services.gpu_worker.engine.limits import EngineLimits

ALONE: Final = EngineLimits(burst_rounds=1, busy_burst_rounds=1)
"""Of a reference: one round a burst."""


def pools(*, streams: int, rows: int, chunk: int, snapshots: int, host_bytes: int = 0) -> EngineConfig:
    """For `streams` at once of at most `rows` rows each, and cached rows of twice as many."""
    blocks = -(-rows // BLOCK_ROWS)
    return EngineConfig(
        num_blocks=3 * streams * blocks,
        num_slots=streams,
        num_snapshots=snapshots,
        max_batch=streams,
        prefill_chunk=chunk,
        max_context=blocks * BLOCK_ROWS,
        host_tier_bytes=host_bytes,
    )


def drafting(rounds: int, **more: Any) -> EngineLimits:
    """Every request drafts as it asks; `rounds` a burst; `more` fields of the limits."""
    return EngineLimits(
        burst_rounds=rounds, busy_burst_rounds=rounds, draft_cost=0.0, ngram_cost=0.0, floor=0.0, **more
    )
