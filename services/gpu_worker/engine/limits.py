"""Bounds of an engine that are policy, not memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from shared.errors import EngineFault

BlockWidth: TypeAlias = Literal["gate", "ladder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecGate:
    """Speculation by load, the streams that run or wait: a new stream gets a drafter up to `low`; from `high` on all
    are demoted; between the two nothing changes. With `least_gain`, launches are timed at the start, and over `low` what
    speculation is seen to gain decides. Raises EngineFault unless high >= low + 1, low >= 1 and least_gain > 1."""

    low: int = 2
    high: int = 4
    least_gain: float | None = None
    """Tokens a second over those of plain decode; null = the load alone decides."""

    def __post_init__(self) -> None:
        if self.low < 1 or self.high < self.low + 1:
            raise EngineFault(f"spec gate: high {self.high} must be over low {self.low}, which is at least 1")
        if self.least_gain is not None and self.least_gain <= 1.0:
            raise EngineFault(f"spec gate: a least gain of {self.least_gain} does not pay")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """Bounds that are policy, not memory."""

    max_waiting: int = 64  #: queued requests; one more is Overloaded
    burst_rounds: int = 8  #: verify passes between two scheduler decisions
    busy_burst_rounds: int = 2  #: the same while a prompt is being primed
    spec_gate: SpecGate | None = None  #: null = speculate at any load
    draft_cost: float = 0.35  #: of one MTP draft and its column, in verify passes; 0 = never shorten
    ngram_cost: float = 0.1  #: the same of one n-gram or block draft, which costs its verify column alone
    block_cost: float = 0.8  #: of one pass of the block drafter, in verify passes
    block_width: BlockWidth = (
        "gate"  #: what a block's verify width follows: what pays, or the last round's luck
    )
    floor: float = 1.1  #: tokens a verify under which a stream's drafter is turned off (FR-22); 0 = never
    floor_rounds: int = 64  #: rounds that are judged together
    max_parked: int = 32  #: finished sessions that wait for their next turn
    decode_ckpt_blocks: int = 4  #: blocks between two checkpoints of a decoding stream; 0 = none are taken
    max_decoded: int = (
        8  #: decode checkpoints and sessions of `reuse = "decode"` kept, a quarter of the snapshots at most
    )
    decode_reserve: int = 64  #: completion rows that a stream is admitted with; it gets more as it decodes
    max_pending_captures: int = 16  #: captures that wait for the broker; more are dropped and counted
