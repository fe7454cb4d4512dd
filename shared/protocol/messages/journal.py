"""What workers write to `tok.<request>`, the journal of one request: claims, prompt scores, frames, the terminal."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from shared.protocol.messages.base import Failure, Message, Part
from shared.protocol.messages.requests import Reuse

FinishReason = Literal["stop", "length", "cancelled", "error"]


class TokenLogprobs(Part, frozen=True, kw_only=True):
    """Log probabilities at one position, natural log, before temperature (OpenAI's meaning)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Started(Message, frozen=True, kw_only=True):
    """A worker's claim. `attempt` = last journalled attempt + 1, never the delivery count."""

    request_id: str
    attempt: int
    worker_id: str
    fingerprint: str
    cached_tokens: int
    resumed_offsets: tuple[int, ...]  # a choice: completion tokens already in the journal
    resumed_scores: int  # prompt tokens whose log probabilities are already in the journal
    at_ns: int


class PromptScores(Message, frozen=True, kw_only=True):
    """Log probabilities of prompt tokens, when they were asked for: of the prompt, so of all choices alike.

    `entries[i]` scores prompt token `offset + i + 1`, from the row before it. All of them, `prompt tokens - 1`, come in
    order and before the first `Frame` of any choice.
    """

    request_id: str
    attempt: int
    offset: int  # entries before this message
    entries: tuple[TokenLogprobs, ...]


class Frame(Message, frozen=True, kw_only=True):
    """The tokens of one burst of one choice. Without any: the worker hands the request back, and was well; its claim does
    not count for poison."""

    request_id: str
    attempt: int
    choice: int
    offset: int  # completion tokens of this choice before this frame
    tokens: bytes  # packed
    logprobs: tuple[TokenLogprobs, ...] | None


class SpecTelemetry(Part, frozen=True, kw_only=True):
    """Counters of one choice's session, of the attempt that ended it. A round gives its accepted drafts and one token
    more; a replayed token is in no round."""

    rounds: int  # verify passes, but for those over journalled tokens
    drafted: int
    accepted: int
    replayed: int | UnsetType = UNSET  # journalled tokens that were verified again; absent = none


class ChoiceEnd(Part, frozen=True, kw_only=True):
    """How one choice ended. `stop_id` is the id that ended it, counted in `completion_tokens` and never emitted; null where
    something else did, one of `last_ids` for instance."""

    choice: int
    finish: FinishReason
    completion_tokens: int
    emitted_tokens: int
    stop_id: int | None
    spec: SpecTelemetry


class Terminal(Message, frozen=True, kw_only=True):
    """Exactly one a request, the last of its journal. Usage is what the broker settles."""

    request_id: str
    tenant: str
    key_id: str
    model: str
    attempt: int
    worker_id: str
    ends: tuple[ChoiceEnd, ...]
    failure: Failure | None
    cancel_reason: str | None
    prompt_tokens: int
    scored_tokens: int  # prompt tokens whose log probabilities the journal holds
    cached_tokens: int
    completion_tokens: int
    cache_decision: str  # "hit", "miss", "bypass", "decode", or why a hit was not taken
    reuse: Reuse  # "decode": a choice went on from decode-made rows
    exact: bool  # whether a cold run gives the same stream
    queue_ns: int
    prime_ns: int
    decode_ns: int
    at_ns: int


StreamMessage = Started | PromptScores | Frame | Terminal
