"""What a session hands to the engine: tokens, an ending, and the shape it was built for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from services.gpu_worker.engine.events import FinishReason, TokenLogprob
from services.gpu_worker.engine.limits import BlockWidth

REPLAY_DIVERGED = "replay_diverged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a stream ended."""

    reason: FinishReason
    stop_id: int | None = None
    error_code: str | None = None
    detail: str | None = None

    @property
    def silent(self) -> bool:
        """Whether the last token taken is not told to the client: a stop id, or one that the journal contradicts."""
        return self.stop_id is not None or self.reason is FinishReason.ERROR


@dataclass(frozen=True, kw_only=True, slots=True)
class Emission:
    """A token for the client."""

    token: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionShape:
    """Sizes that every session of an engine shares."""

    vocab: int
    hidden: int
    max_verify: int  #: most columns of one verify
    cache_max_ctx: int  #: most rows of one sequence
    draft_cost: float = 0.0  #: of one draft of the head, in verify passes; 0 = always draft as many as asked
    ngram_cost: float = 0.0  #: the same of an n-gram draft, or of a block's: its column of the verify alone
    block_cost: float = 0.0  #: of one pass over a block, in verify passes, whatever it drafts
    block_width: BlockWidth = "gate"  #: see `EngineLimits`
    floor: float = 0.0  #: tokens a verify under which a drafter is turned off; 0 = never
    floor_rounds: int = 1  #: rounds that are judged together


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A boundary of a session that the prefix tree kept: where the next turn may go on."""

    key: bytes
    position: int


class DeclineReason(StrEnum):
    """Why a parked session does not serve a prompt."""

    NO_CHECKPOINT = "no_checkpoint"  #: nothing was captured, or the capture failed
    NOT_RESIDENT = "not_resident"  #: refused by the broker, or evicted since
    DIVERGED = "diverged"  #: another history
    NO_SUFFIX = (
        "no_suffix"  #: the prompt ends at the checkpoint: no turn goes on; the tree serves it whole (R-Q6)
    )


class TurnOutcome(StrEnum):
    """What became of a prompt that may go on from what an earlier turn decoded (`reuse = "decode"`)."""

    SERVED = "served"
    NOT_KEPT = "not_kept"  #: no turn of it is kept: it did not ask, or gave way, or this is the first one
    DIVERGED = "diverged"  #: another history, be it by one token of the answer as the caller tells it
    NO_SUFFIX = "no_suffix"  #: the prompt ends at or before the kept position
    DEEPER_HIT = "deeper_hit"  #: an entry of the tree reaches further, and is exact


@dataclass(frozen=True, kw_only=True, slots=True)
class Decline:
    """A nomination that exact tokens, or the pools, turned down. `position` = tokens that agreed."""

    reason: DeclineReason
    position: int

    @property
    def gone(self) -> bool:
        """Whether the checkpoint will serve nobody any more."""
        return self.reason in (DeclineReason.NO_CHECKPOINT, DeclineReason.NOT_RESIDENT)
