"""Where the time to a first token goes, by the spans of the same requests.

to the gateway   from the caller's send until the gateway has the request's head
gateway          until it begins to enqueue: checked, resolved, rendered, tokenised, routed
queue            until a worker has it: enqueued, delivered
worker           until the engine's first burst: claimed, submitted
back             until the caller has the first text: journalled, heard live, decoded, told
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from services.bench.figures import quantiles
from services.bench.queue_client import Timed
from shared.clock import SYSTEM
from shared.errors import Unavailable
from shared.tracestore import StoredSpan, TraceStore

SPANS_S: Final = 20.0
_POLL_S: Final = 0.2
_ROOT: Final = "POST /v1/chat/completions"
_NEEDED: Final = (_ROOT, "enqueue", "worker.request", "engine.burst")


async def way(store: TraceStore, streams: Sequence[Timed]) -> dict[str, dict[str, float]]:
    """Quantiles of each part, in milliseconds. Raises Unavailable when the spans do not come."""
    offset_ns = SYSTEM.wall_ns() - SYSTEM.monotonic_ns()
    parts: dict[str, list[float]] = {}
    for timed in streams:
        marks = await _marks(store, timed.trace_id())
        times = (timed.sent_ns + offset_ns, *marks, timed.first_text_ns() + offset_ns)
        for place, name in enumerate(("to_the_gateway", "gateway", "queue", "worker", "back")):
            parts.setdefault(name, []).append((times[place + 1] - times[place]) / 1e6)
    return {name: quantiles(values) for name, values in parts.items()}


async def _marks(store: TraceStore, trace_id: str) -> tuple[int, ...]:
    """Wall-clock nanoseconds between the parts."""
    deadline_ns = SYSTEM.monotonic_ns() + int(SPANS_S * 1e9)
    while True:
        first: dict[str, StoredSpan] = {}
        for span in store.read(trace_id):  # by their start
            first.setdefault(span.name, span)
        if all(name in first for name in _NEEDED):
            begins = tuple(first[name].start_ns for name in _NEEDED[:-1])
            return (*begins, first[_NEEDED[-1]].end_ns)
        if SYSTEM.monotonic_ns() >= deadline_ns:
            raise Unavailable(f"the spans of trace {trace_id!r} did not come")
        await asyncio.sleep(_POLL_S)
