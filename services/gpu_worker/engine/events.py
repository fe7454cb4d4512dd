"""What comes out of the engine: the events of `Engine.step`, plain frozen values.

The worker turns them into frames, spans and broker messages. Times are nanoseconds: `*_ns` stamps are wall time since the
epoch (`shared.clock`), `queue_ns` and `restore_ns` are durations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from services.gpu_worker.engine.requests import DrafterKind, ReuseKind


class FinishReason(StrEnum):
    """Why a stream ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """Log probability of a chosen token and of the best ones, from the raw row (before bias and temperature)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  #: best first, ties by smallest id


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecTelemetry:
    """Lifetime counters of one stream; monotone, so consumers subtract (R-S12)."""

    rounds: int = 0  #: verify passes, but for those over journalled tokens
    drafted: int = 0
    accepted: int = 0
    replayed: int = 0  #: journalled tokens that were verified again: nobody's drafts
    drafted_at: tuple[int, ...] = ()  #: by draft position, first draft first
    accepted_at: tuple[int, ...] = ()
    capture_failures: int = 0

    @property
    def tau(self) -> float:
        """Accepted drafts a round."""
        return self.accepted / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """The request holds its slot and blocks, and a hit, if any, is restored: the broker's lease may be released."""

    request_id: str
    choice: int
    cached_tokens: int
    hit_key: bytes | None
    queue_ns: int
    restore_ns: int
    end_ns: int
    reuse: ReuseKind = "exact"  #: "decode": it goes on from what the turn before decoded


@dataclass(frozen=True, kw_only=True, slots=True)
class HitDropped:
    """A waiting request lost its hit to make room and will run cold: release the lease."""

    request_id: str
    key: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Primed:
    """The prompt is in the cache. `tokens` were computed (not cached), in `chunks` launches."""

    request_id: str
    choice: int
    tokens: int
    chunks: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScored:
    """Log probabilities of prompt tokens, for a request that asked (R-Q20). `entries[i]` scores prompt token
    `offset + i + 1`, from the row before it; the pieces of a prompt come in order and have `prompt_len - 1` entries
    together. One piece is at most one prefill launch."""

    request_id: str
    choice: int
    offset: int
    entries: tuple[TokenLogprob, ...]
    end_ns: int


class Share(NamedTuple):
    """What one drafter had of a stream's rounds."""

    drafter: DrafterKind
    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """New completion tokens. `offset` is the completion index of the first; stop ids are never among them."""

    request_id: str
    choice: int
    offset: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None  #: one a token
    rounds: int
    drafted: int
    accepted: int
    start_ns: int
    end_ns: int
    replayed: int = 0  #: since the burst before, see `SpecTelemetry`
    shares: tuple[Share, ...] = ()  #: who proposed; several, where a stream keeps several drafters


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A boundary capture waits for the broker: answer with `Engine.publish` or `Engine.discard`.

    An entry owns its state and the KV rows between its parent's position and its own. Three cases of `kv_bytes`:
    new rows (`splits_key` null), rows that pass over from an existing entry `splits_key` whose new parent is this
    entry (the same bytes leave that entry), and 0 when a state comes back to an entry that had lost it.
    """

    capture_id: int
    request_id: str
    key: bytes
    parent_key: bytes | None  #: nearest entry below, null at the root
    splits_key: bytes | None
    position: int
    state_bytes: int
    kv_bytes: int
    end_ns: int


class DrafterOffReason(StrEnum):
    """Why a stream that asked for speculation decodes plainly from here on, to its end."""

    LOAD = "load"  #: too much runs and waits: batching brings more (the spec gate)
    ACCEPTANCE = "acceptance"  #: too few drafts stood (the floor)
    CONTEXT = "context"  #: the end of the context is near (R-S9)
    ABSENT = "absent"  #: the worker has no such drafter
    PROMPT = "prompt"  #: the prompt is too short for a block drafter
    DRAFT_ROWS = "draft_rows"  #: it goes on from a turn that had no drafter: the head's rows are not written


class ChoiceReason(StrEnum):
    """Why a stream that left the choice to the worker has the drafter that it has."""

    GAIN = "gain"  #: it is expected to bring the most tokens a second
    PROBE = "probe"  #: it has not been tried for long
    NO_GAIN = "no_gain"  #: none is expected to pay
    SWITCH = "switch"  #: it has been bringing this stream more than the one before


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterChosen:
    """The worker chose a stream's drafter, or another one. No token changes by it."""

    request_id: str
    choice: int
    drafter: DrafterKind
    reason: ChoiceReason
    gains: tuple[tuple[DrafterKind, float], ...]
    """Expected tokens a second over plain decode's, of each that could serve; empty where none was weighed."""
    end_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterOff:
    """A stream lost its drafter. No token changes by it."""

    request_id: str
    choice: int
    drafter: DrafterKind
    reason: DrafterOffReason
    tokens_per_verify: float  #: of the stream so far; 0 before its first round
    end_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Parked:
    """A step did not fit into memory, or the stream gave its blocks to an older one: it was set aside and waits at the
    head of the queue. It will be primed again and verify what it emitted; nothing is emitted twice."""

    request_id: str
    choice: int
    retries: int  #: failures alone since its last new token; the third is the end
    emitted: int
    end_ns: int
    preempted: bool = False  #: it gave way; nothing failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The one terminal event of a (request, choice). `completion_tokens` counts a `stop_id`, which no burst
    carries, and otherwise equals the tokens delivered (`emitted` ones included)."""

    request_id: str
    choice: int
    reason: FinishReason
    error_code: str | None
    detail: str | None  #: the reason given to `cancel`, or the error's message (never prompt text)
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stop_id: int | None
    telemetry: SpecTelemetry
    end_ns: int
    reuse: ReuseKind = "exact"
    """With "decode" its prefix holds decode-made rows, so a cold run may say other tokens (C1.3)."""


Event: TypeAlias = (
    Admitted
    | HitDropped
    | PromptScored
    | Primed
    | Burst
    | Captured
    | DrafterChosen
    | DrafterOff
    | Parked
    | Finished
)
