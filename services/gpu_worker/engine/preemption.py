"""Who gives its blocks away when running streams need more than are free. Pure: answers, changes nothing.

A stream is admitted with its prompt's blocks and a small reserve, and gets more as it decodes. Room is found in this
order: free blocks; idle entries of the cache, for which there is some patience; the youngest stream, which goes back to
the head of the queue.

The oldest stream never gives way to another, so it ends; then the next one is the oldest. Nobody is put back for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.gpu_worker.engine.streams import Stream

PATIENCE_STEPS: Final = 64
"""Steps that a stream without room waits for idle entries to be evicted, before a younger one gives way."""


def by_age(streams: Sequence[Stream]) -> list[Stream]:
    """The oldest first, by first arrival."""
    return sorted(streams, key=lambda stream: stream.number)


def spare_blocks(streams: Sequence[Stream]) -> int:
    """Blocks to keep free for streams that run: one for each that will ask for more."""
    return sum(1 for stream in streams if stream.growing)


def gives_way(streams: Sequence[Stream], starved: Stream, *, evictable: bool) -> Stream | None:
    """The stream whose blocks `starved` needs, perhaps itself. Null: it waits, for eviction, for the memory of a
    stream that has ended, or because it runs alone."""
    if evictable and starved.starved < PATIENCE_STEPS:
        return None
    if any(not stream.going for stream in streams):
        return None
    youngest = by_age(streams)[-1]
    return youngest if len(streams) > 1 else None
