"""How much is in the queues that this worker pulls, for whoever scales workers by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from shared.protocol import subjects

QUEUES: Final = ("own", *subjects.PRIORITIES)


def depths(counts: Mapping[str, int], own: str) -> dict[str, int]:
    """Requests in each queue, claimed or not, of those counted by subject; those of other workers are theirs to tell. `own`
    is what the subjects of this worker's own queue begin with."""
    found: Counter[str] = Counter()
    for subject, count in counts.items():
        found["own" if subject.startswith(own) else subjects.queue_of(subject)] += count
    return {queue: found[queue] for queue in QUEUES}
