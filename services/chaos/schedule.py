"""Which fault comes when: a pure function of the seed, so that a run that failed can be asked for again.

Every kind comes once in each round, in an order of its own. A fault says which of the processes that are ready it is
done to by a number; who that is depends on the run, what is done and in which order does not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What can be done to the line."""

    WORKER_KILL = "worker-kill"
    WORKER_STOP = "worker-stop"
    WORKER_DRAIN = "worker-drain"
    GATEWAY_KILL = "gateway-kill"
    GATEWAY_DRAIN = "gateway-drain"
    BROKER_KILL = "broker-kill"
    BROKER_DRAIN = "broker-drain"
    NATS_RESTART = "nats-restart"
    POSTGRES_RESTART = "postgres-restart"
    NATS_CUT = "nats-cut"
    NATS_SLOW = "nats-slow"
    QUEUE_FULL = "queue-full"


ACK_WAIT_S: Final = 4.0
"""Of the workers of a run, seconds."""
HOLD_S: Final = {
    Kind.NATS_SLOW: (2.0, 5.0),
    Kind.QUEUE_FULL: (1.0, 3.0),
}
"""How long a fault lasts that is undone, seconds; for how long a worker is stopped depends on its ack_wait."""
STOPPED_BEYOND_S: Final = (0.5, 3.0)
"""A stopped worker goes on so long after its claims ran out."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. `after_s` seconds after the one before (or after the start), as soon as the line can bear it."""

    number: int
    kind: Kind
    after_s: float
    target: int
    hold_s: float


def chosen(names: Sequence[str] | None) -> tuple[Kind, ...]:
    """The kinds of these names, all of them without any. Leaves the process (status 2) at a name that is none."""
    unknown = set(names or ()) - set(Kind)
    if unknown:
        sys.stderr.write(f"burstline: --kind {', '.join(sorted(unknown))} is none of {', '.join(Kind)}\n")
        raise SystemExit(2)
    return tuple(Kind(name) for name in names) if names else tuple(Kind)


def faults(seed: int, kinds: Sequence[Kind], *, every_s: float, ack_wait_s: float) -> Iterator[Fault]:
    """An endless schedule: about one fault in `every_s` seconds.

    Raises:
        ValueError: no kind is given.
    """
    if not kinds:
        raise ValueError("a schedule needs a kind of fault")
    draw = random.Random(seed)
    number = 0
    while True:
        bag = sorted(set(kinds))
        draw.shuffle(bag)
        for kind in bag:
            number += 1
            low, high = HOLD_S.get(kind, (0.0, 0.0))
            if kind is Kind.WORKER_STOP:
                low, high = (ack_wait_s + beyond for beyond in STOPPED_BEYOND_S)
            yield Fault(
                number=number,
                kind=kind,
                after_s=every_s * draw.uniform(0.5, 1.5),
                target=draw.randrange(1 << 16),
                hold_s=draw.uniform(low, high),
            )
