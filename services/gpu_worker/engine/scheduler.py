"""Decides what the next step does. Pure: a picture of the engine in, a plan out; `engine` acts.

Order of a step: admit from the head of the queue, prime at most one chunk budget, run one burst over everything that
decodes. Prefill and decode rows never share a launch (C1.1); while a prompt is primed bursts are short, so that the
time between tokens of running streams is bounded by one chunk and a few rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.limits import EngineLimits, SpecGate


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What is free now."""

    blocks: int
    slots: int
    batch: int  #: sequences that may still join


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """`prefill[i]` rows for the i-th priming session (0 = none), and the rounds of the burst."""

    prefill: tuple[int, ...]
    rounds: int


def admissions(waiting: Sequence[int], room: Room) -> int:
    """How many requests to admit from the head of the queue; `waiting` = fresh blocks each needs.

    First come, first served: one that does not fit holds back those behind it, so that a long prompt is not starved.
    """
    blocks, seats = room.blocks, min(room.slots, room.batch)
    count = 0
    for need in waiting:
        if count == seats or need > blocks:
            break
        blocks -= need
        count += 1
    return count


def plan_step(priming: Sequence[int], decoding: int, *, prefill_chunk: int, limits: EngineLimits) -> StepPlan:
    """`priming` = prompt rows left of each priming session, oldest first; `decoding` = sessions that decode.

    A session gets whole 64-row tiles of the chunk budget, or its rest. Where a prompt ends in this step the burst is
    one round, so that its first tokens leave at once.
    """
    budget = prefill_chunk
    shares = []
    for left in priming:
        share = left if left <= budget else budget // BLOCK_ROWS * BLOCK_ROWS
        shares.append(share)
        budget -= share
    finishing = any(share == left for share, left in zip(shares, priming, strict=True))
    if finishing:
        rounds = 1
    elif priming and decoding:
        rounds = limits.busy_burst_rounds
    else:
        rounds = limits.burst_rounds
    return StepPlan(prefill=tuple(shares), rounds=rounds)


class Speculation(Enum):
    """What the spec gate says of a step."""

    ADMIT = "admit"  #: new streams may speculate
    HOLD = "hold"  #: who speculates goes on, new streams decode plainly
    DEMOTE = "demote"  #: everybody decodes plainly


def speculation(load: int, gate: SpecGate | None, gain: float | None = None) -> Speculation:
    """`load` = projected: streams that run and that wait. Between low and high nothing flips to and fro.

    `gain` = tokens a second with speculation at this load, over those without; null = not known. Over `low`, the gate's
    `least_gain` admits in spite of the load, and no less than plain decode keeps those who speculate.
    """
    if gate is None or load <= gate.low:
        return Speculation.ADMIT
    known = gain if gate.least_gain is not None and gain is not None else 0.0
    if known >= (gate.least_gain or math.inf):
        return Speculation.ADMIT
    return Speculation.DEMOTE if load >= gate.high and known < 1.0 else Speculation.HOLD
