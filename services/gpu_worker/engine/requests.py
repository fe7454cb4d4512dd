"""What goes into the engine and what comes out of it: requests, hits and events.

Plain frozen values, no torch, no behaviour beyond their own checks. The worker's host thread builds `GenerateRequest`s, and turns the events
of `Engine.step` into frames, spans and broker messages. Times are nanoseconds: `*_ns` stamps are wall time since the
epoch (`shared.clock`), `queue_ns` and `restore_ns` are durations.

Positions are absolute token indices. The *grid* is the multiples of 64; captures, hits and checkpoints lie on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from shared.errors import EngineFault


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one token is picked from a row of logits. Every value is resolved: the engine has no defaults of its own.

    `seed` is already f(seed, choice): choices of one request differ in it and in nothing else.
    """

    seed: int  #: 64 bits, unsigned
    temperature: float = 1.0  #: 0 = greedy
    top_k: int = 0  #: 0 = off
    top_p: float = 1.0  #: 1 = off
    min_p: float = 0.0  #: 0 = off; relative to the most likely token
    repetition_penalty: float = 1.0  #: 1 = off; counts prompt and completion
    presence_penalty: float = 0.0  #: 0 = off; counts the completion
    frequency_penalty: float = 0.0  #: 0 = off; counts the completion
    logit_bias: tuple[tuple[int, float], ...] = ()  #: (token id, added to its logit)
    min_tokens: int = 0  #: stop ids are masked until that many completion tokens exist
    allowed_ids: frozenset[int] | None = None  #: null = all
    banned_ids: frozenset[int] = frozenset()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


DrafterKind: TypeAlias = Literal["none", "mtp", "ngram"]
"""What proposes tokens. It changes how fast a stream comes, never what it says."""


ReuseKind: TypeAlias = Literal["exact", "decode"]
"""What a turn may go on from: prefill-made rows alone, or also (opted in, and named) what the turn before decoded (C1.3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One choice of one request, ready to be primed."""

    request_id: str
    choice: int = 0
    root: bytes  #: chain root of the namespace, 32 bytes
    tokens: tuple[int, ...]  #: the prompt, at least one id
    chain: tuple[bytes, ...]  #: chain key of every full 64-block of `tokens`, ascending
    sampling: SamplingParams
    max_tokens: int  #: completion budget, a stop id counts; 0 = only prime
    stop_ids: frozenset[int] = frozenset()  #: EOS is among them unless the request ignores it
    capture_at: int | None = None  #: shared-prefix boundary worth cutting, floored to the grid
    ckpt_at: int | None = None  #: stable boundary for the next turn, floored to the grid; null = prompt end
    use_cache: bool = True  #: false: no restore and no capture
    reuse: ReuseKind = "exact"
    drafter: DrafterKind = "mtp"  #: a model without an MTP head decodes plainly instead
    speculation_k: int = 0  #: drafts a round; 0 = plain decode
    top_logprobs: int | None = None  #: null = no logprobs; 0 = the chosen token's alone
    prompt_logprobs: int | None = None  #: k best of every prompt row; such a request bypasses the cache
    labels: tuple[str, ...] = ()  #: session, user, narrowest first: nominate a parked session, never a key
    emitted: tuple[int, ...] = ()  #: tokens that an earlier attempt journalled: verified, never emitted again

    @property
    def key(self) -> tuple[str, int]:
        """What names one stream."""
        return self.request_id, self.choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """The deepest usable entry for a prompt: restoring `key` skips the first `position` tokens."""

    key: bytes
    position: int


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

    rounds: int = 0  #: verify passes
    drafted: int = 0
    accepted: int = 0
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
    DRAFT_ROWS = "draft_rows"  #: it goes on from a turn that had no drafter: the head's rows are not written


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
    """The one terminal event of a (request, choice). On `stop`, `completion_tokens` counts the stop id, which no
    burst carries; otherwise it equals the tokens delivered (`emitted` ones included)."""

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
    reuse: ReuseKind = (
        "exact"  #: "decode": its prefix holds decode-made rows, so a cold run may say other tokens (C1.3)
    )


Event: TypeAlias = (
    Admitted | HitDropped | PromptScored | Primed | Burst | Captured | DrafterOff | Parked | Finished
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCounts:
    """Conservation: free + owned + cached == total. *Cached* is what the prefix tree holds, *owned* what only
    running sequences, hits or waiting captures hold."""

    total: int
    free: int
    owned: int
    cached: int

    @property
    def balanced(self) -> bool:
        return self.free + self.owned + self.cached == self.total


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """What the engine would like to be evicted now, so that queued work or captures fit."""

    blocks: int
    snapshots: int
    ruined: int = 0  #: entries whose bytes in the host tier were wrong: they only wait to be withdrawn

    def __bool__(self) -> bool:
        return self.blocks > 0 or self.snapshots > 0 or self.ruined > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evicted:
    """What `Engine.evict` did. A key in `gone` left the tree with its KV; one in `stateless` lost its state and
    keeps its rows while an entry above it lives. A key named by the caller but in neither was in use. `blocks` and
    `snapshots` became free on the device; what left the host tier is not counted."""

    gone: tuple[bytes, ...]
    stateless: tuple[bytes, ...]
    blocks: int
    snapshots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AffinityCounts:
    """What became of nominations: prompts that went on from a parked session, and those that did not."""

    parked: int = 0
    served: int = 0
    declined: tuple[tuple[str, int], ...] = ()  #: by reason
    left_at: tuple[tuple[int, int], ...] = ()  #: (lower edge in tokens, declines whose tokens agreed so far)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedCounts:
    """States of decoding sequences that are kept beside the tree: now, parked for a next turn, and ever."""

    held: int = 0
    parked: int = 0
    kept: int = 0
    restored: int = 0
    dropped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A consistent picture between two steps."""

    blocks: PoolCounts
    slots: PoolCounts
    snapshots: PoolCounts
    waiting: int
    priming: int
    decoding: int
    pending_captures: int
    entries: int
    rounds: int
    drafted: int
    accepted: int
    capture_failures: int
    prefill_tokens: int
    decode_tokens: int
    speculating: int = 0  #: decoding streams that have a drafter
    set_aside: int = 0  #: streams parked for lack of memory, ever
    preempted: int = 0  #: those of them that gave way to older ones
    affinity: AffinityCounts = AffinityCounts()
    decoded: DecodedCounts = DecodedCounts()
    host_bytes: int = 0  #: in the host tier
    spilled: int = 0  #: blocks and states that went there, ever
    brought_back: int = 0
    mismatches: int = 0  #: copies that were not what had been taken; each was a miss


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecGate:
    """Speculation by load, the streams that run or wait: a new stream gets a drafter up to `low`; from `high` on all
    are demoted; between the two nothing changes. With `least_gain`, launches are timed at the start, and over `low` what
    speculation is seen to gain decides. Raises EngineFault unless high >= low + 1, low >= 1 and least_gain > 1."""

    low: int = 2
    high: int = 4
    least_gain: float | None = None  #: tokens a second over those of plain decode; null = the load alone decides

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
    ngram_cost: float = 0.1  #: the same of one n-gram draft, which costs its verify column alone
    floor: float = 1.1  #: tokens a verify under which a stream's drafter is turned off (FR-22); 0 = never
    floor_rounds: int = 64  #: rounds that are judged together
    max_parked: int = 32  #: finished sessions that wait for their next turn
    decode_ckpt_blocks: int = 4  #: blocks between two checkpoints of a decoding stream; 0 = none are taken
    max_decoded: int = (
        8  #: decode checkpoints and sessions of `reuse = "decode"` kept, a quarter of the snapshots at most
    )
    decode_reserve: int = 64  #: completion rows that a stream is admitted with; it gets more as it decodes
    max_pending_captures: int = 16  #: captures that wait for the broker; more are dropped and counted
