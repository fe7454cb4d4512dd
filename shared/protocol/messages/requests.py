"""What a gateway asks of the workers: a request with every parameter decided, and its cancellation."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from shared.protocol.messages.base import Message, Part

Priority = Literal["high", "normal", "low"]

Reuse = Literal["prefill", "decode"]
"""Prefill-made rows alone (exact), or also what the turn before decoded: opted in, and named in the terminal (C1.3)."""


class Sampling(Part, frozen=True, kw_only=True):
    """How a token is picked, fully resolved. `seed` is the request's; choice i uses f(seed, i) (protocol/seeds.py)."""

    seed: int  # 0 <= seed < 2^64
    temperature: float  # 0 = greedy
    top_k: int  # 0 = off
    top_p: float  # 1.0 = off
    min_p: float  # 0.0 = off
    repetition_penalty: float  # 1.0 = off
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    min_tokens: int
    allowed_ids: tuple[int, ...] | None
    banned_ids: tuple[int, ...]


class NamespaceParts(Part, frozen=True, kw_only=True):
    """What keeps caches apart (C4). The tenant comes from the credential; `salt` is the caller's and only narrows."""

    fingerprint: str
    adapter_digest: str  # "" without an adapter
    tenant: str
    salt: str  # "" without one


class CachePlan(Part, frozen=True, kw_only=True):
    """What the gateway knows about reuse. Positions are not yet floored to the grid: the engine's setters do that."""

    enabled: bool
    checkpoint_at: int | None  # end of the stable part, before the generation header; None = prompt end
    capture_at: int | None  # a shared prefix worth cutting
    labels: tuple[str, ...]  # digests of session id, cache key, user, in this order: nominate, never decide
    reuse: Reuse  # what this turn may go on from, and may leave to the next one


class Speculation(Part, frozen=True, kw_only=True):
    """Which drafter and how many drafts a round, at most; k = 0 is plain decode. `auto`: the worker chooses."""

    drafter: Literal["auto", "none", "mtp", "block", "ngram"]
    k: int


class GenerateRequest(Message, frozen=True, kw_only=True):
    """One accepted request, on `req.<fingerprint>.…`. The internal id is unique; client ids are labels only."""

    request_id: str
    tenant: str
    key_id: str
    model: str
    namespace: NamespaceParts
    prompt: bytes  # packed tokens
    choices: int
    max_tokens: int  # 0 = only prime, for the prompt's log probabilities or its echo
    stop_ids: tuple[int, ...]  # ends of sequence included, unless the caller ignores them
    sampling: Sampling
    top_logprobs: int | None  # None = no logprobs; 0 = only the chosen token's
    prompt_logprobs: int | None  # the same of the prompt's tokens but the first; the cache is bypassed
    cache: CachePlan
    speculation: Speculation
    priority: Priority
    created_ns: int
    deadline_ns: int  # absolute; a worker does not start an expired request
    grammar: str | UnsetType = UNSET  # what each choice follows; absent = nothing, no byte
    last_ids: tuple[int, ...] | UnsetType = UNSET  # one of them ends a choice, and is emitted; absent = none

    @property
    def to_score(self) -> int:
        """Prompt tokens whose log probabilities are wanted: all but the first, or none."""
        return max(0, len(self.prompt) // 4 - 1) if self.prompt_logprobs is not None else 0


class ClaimCheck(Message, frozen=True, kw_only=True):
    """In place of a request that is too large for one message: the request without its prompt, which lies in chunks on
    `body.<request>` (shared/transport/bodies.py)."""

    request: GenerateRequest  # its prompt is empty
    prompt_bytes: int
    prompt_digest: bytes  # SHA-256 of the packed prompt


class CancelRequest(Message, frozen=True, kw_only=True):
    """On `cxl.<request>`: journalled and read live. `offset` = completion tokens of the choice that its reader kept."""

    request_id: str
    reason: Literal["client_disconnected", "stop_string", "deadline", "operator"]
    choice: int | None  # None = all choices
    offset: int | None
