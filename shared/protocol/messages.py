"""Every message that crosses a process border. Frozen, keyword-only, versioned; no defaults that decide anything.

The gateway resolves every parameter (C1.7): a worker that reads a `GenerateRequest` chooses nothing. Token lists are
packed little-endian u32 (`pack_tokens`), so that a prompt of 30,000 tokens is 120 kB and not a list of boxed integers.

Units are in the names: `_ns` nanoseconds since the epoch, `_s` seconds, `_bytes` bytes. Positions are absolute token
positions of the sequence; offsets count completion tokens of one choice.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

Priority = Literal["high", "normal", "low"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


Reuse = Literal["prefill", "decode"]
"""Prefill-made rows alone (exact), or also what the turn before decoded: opted in, and named in the terminal (C1.3)."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all. `VERSION` goes up with any change of fields or meaning."""

    VERSION: ClassVar[int] = 1


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=False):
    """A value inside messages; it has no life of its own on the wire."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. Raises OverflowError for an id outside 0..2^32-1."""
    packed = array.array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Inverse of `pack_tokens`. Raises ValueError if the length is not a multiple of 4."""
    packed = array.array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


# ---- the request -----------------------------------------------------------------------------------------------------


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
    """Which drafter and how many drafts a round; k = 0 is plain decode."""

    drafter: Literal["none", "mtp", "ngram"]
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
    prompt_logprobs: (
        int | None
    )  # the same of every prompt token but the first; such a request bypasses the cache
    cache: CachePlan
    speculation: Speculation
    priority: Priority
    created_ns: int
    deadline_ns: int  # absolute; a worker does not start an expired request

    @property
    def to_score(self) -> int:
        """Prompt tokens whose log probabilities are wanted: all but the first, or none."""
        return max(0, len(self.prompt) // 4 - 1) if self.prompt_logprobs is not None else 0


class CancelRequest(Message, frozen=True, kw_only=True):
    """On `cxl.<request>`: journalled and read live. `offset` = completion tokens of choice 0 that the reader kept."""

    request_id: str
    reason: Literal["client_disconnected", "stop_string", "deadline", "operator"]
    choice: int | None  # None = all choices
    offset: int | None


# ---- the token stream (tok.<request>) --------------------------------------------------------------------------------


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
    """The tokens of one burst of one choice."""

    request_id: str
    attempt: int
    choice: int
    offset: int  # completion tokens of this choice before this frame
    tokens: bytes  # packed
    logprobs: tuple[TokenLogprobs, ...] | None


class SpecTelemetry(Part, frozen=True, kw_only=True):
    """Counters of one choice's session. tokens per verify = completion / rounds."""

    rounds: int
    drafted: int
    accepted: int


class ChoiceEnd(Part, frozen=True, kw_only=True):
    """How one choice ended. `stop_id` is the id that ended it; it is counted in `completion_tokens`, never emitted."""

    choice: int
    finish: FinishReason
    completion_tokens: int
    emitted_tokens: int
    stop_id: int | None
    spec: SpecTelemetry


class Failure(Part, frozen=True, kw_only=True):
    """A typed error that travels to the caller unchanged."""

    code: str
    message: str
    status: int
    retry_after_s: int | None


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


# ---- workers ---------------------------------------------------------------------------------------------------------


class Heartbeat(Message, frozen=True, kw_only=True):
    """On `hb.<worker>`, every few seconds. Gateways route by it, the broker notes it; silence means dead."""

    worker_id: str
    epoch: str  # new at every start: replicas of an older epoch are gone
    model: str
    fingerprint: str
    vocabulary_size: int
    max_context: int
    speculation: Speculation  # the worker's default
    ready: bool
    draining: bool
    running: int
    waiting: int
    free_blocks: int  # free, or held by entries, which give way
    total_blocks: int  # 0 = not known
    at_ns: int


# ---- the broker (request/reply on brk.v1.<operation>) ----------------------------------------------------------------


class Reply(Message, frozen=True, kw_only=True):
    """Base of every reply. `failure` set = nothing else holds."""

    failure: Failure | None


class Authenticate(Message, frozen=True, kw_only=True):
    """`key_digest` = SHA-256 of the API key, hex. The key itself never leaves the gateway."""

    key_digest: str


class Identity(Reply, frozen=True, kw_only=True):
    """Who a key stands for and what it may do."""

    tenant: str
    key_id: str
    models: tuple[str, ...]  # () = all
    max_concurrent: int | None


class EntryRef(Part, frozen=True, kw_only=True):
    """One prefix entry: (namespace root, chain key, layout version) and who holds its bytes."""

    key: bytes
    position: int
    workers: tuple[str, ...]


class Lookup(Message, frozen=True, kw_only=True):
    """The longest published entry among `chain` (chain keys of the prompt's full blocks, ascending)."""

    namespace: NamespaceParts
    root: bytes
    chain: tuple[bytes, ...]
    layout_version: int


class LookupReply(Reply, frozen=True, kw_only=True):
    """`entry` None = miss."""

    entry: EntryRef | None


class Reserve(Message, frozen=True, kw_only=True):
    """Ask for room before anything is kept. Bytes are the entry's own: its state part and the KV rows above its parent.

    `parent` is the nearest entry below that this worker holds and has reserved (its rows are charged there); None with
    `parent_position` 0 when there is none. Failure `parent_gone` if the broker does not know it as held by this worker.
    Asking again with the same request, worker and key gives the same reservation. A key that this worker withdrew is
    taken to be freed.

    `splits` names an entry of this worker with the same parent whose lower rows pass to this one: `kv_bytes` of it are
    charged here instead of there, and this entry becomes its parent. An abort gives them back.
    """

    request_id: str
    worker_id: str
    epoch: str
    namespace: NamespaceParts
    root: bytes
    key: bytes
    parent: bytes | None
    splits: bytes | None
    layout_version: int
    position: int
    parent_position: int
    state_bytes: int
    kv_bytes: int


class ReserveReply(Reply, frozen=True, kw_only=True):
    """`granted`, or a refusal: "exists", "skips_budget", "skips_pinned"; or "evict": withdraw these keys, ask again.

    The keys to evict are entries of the same tenant that this worker holds, of any of its namespaces (a chain key
    stands for one namespace only, so it needs no root beside it).
    """

    decision: Literal["granted", "exists", "skips_budget", "skips_pinned", "evict"]
    reservation_id: str | None
    evict: tuple[bytes, ...]


class Commit(Message, frozen=True, kw_only=True):
    """The bytes exist: the entry becomes visible to lookups."""

    reservation_id: str
    worker_id: str
    epoch: str
    digest: str  # hex, of the entry's content; "" while the bytes stay inside the worker's process


class Abort(Message, frozen=True, kw_only=True):
    """The bytes will not exist: the reservation is refunded."""

    reservation_id: str
    worker_id: str


class Lease(Message, frozen=True, kw_only=True):
    """Hold an entry until the restore is complete. Refused when it is gone, evicting, or of another namespace."""

    request_id: str
    worker_id: str
    epoch: str
    namespace: NamespaceParts
    root: bytes
    key: bytes
    layout_version: int
    ttl_s: int


class LeaseReply(Reply, frozen=True, kw_only=True):
    """`lease_id` None = refused, with the reason."""

    lease_id: str | None
    reason: Literal["granted", "gone", "evicting", "not_held_here", "wrong_namespace"]


class Release(Message, frozen=True, kw_only=True):
    """Give a lease back. Idempotent."""

    lease_id: str


class Withdraw(Message, frozen=True, kw_only=True):
    """A holder wants to free entries: refused for those that are leased or not yet committed; the rest are gone for
    lookups from now on. Keys that the broker does not know may be freed. Idempotent. Failure `epoch_gone` when the
    broker declared this epoch over: none of its entries is known any more. Without keys it asks just that."""

    worker_id: str
    epoch: str
    keys: tuple[bytes, ...]


class WithdrawReply(Reply, frozen=True, kw_only=True):
    """The keys that may be freed now, and those that may not."""

    withdrawn: tuple[bytes, ...]
    refused: tuple[bytes, ...]


class Freed(Message, frozen=True, kw_only=True):
    """Withdrawn bytes are free: refund them in the ledger. Idempotent.

    While an entry has children, its state part is free and its KV rows stay, and stay charged; they go with the last
    child: freeing a child also frees the rows of ancestors that have no state and no other child.
    """

    worker_id: str
    epoch: str
    keys: tuple[bytes, ...]


class AnswerSheet(Message, frozen=True, kw_only=True):
    """What a gateway needs to tell a request's stream again: how its tokens become an answer.

    `request` is the one that was enqueued, without salt and labels, and without its prompt unless the answer tells it.
    """

    request: GenerateRequest
    prompt_tokens: int
    chat: bool  # a conversation's answer, else a completion's
    tools: bool  # calls are parsed
    thinking: bool  # the prompt ends inside a thinking block
    stops: tuple[str, ...]
    usage_chunk: bool
    token_ids: bool
    echo: bool  # each choice begins with the prompt
    prompt_logprobs: int | None  # to tell beside the answer; None = not asked for
    route: str


class Remember(Message, frozen=True, kw_only=True):
    """Bind an Idempotency-Key to a request, unless it is bound already: then the reply tells what to.

    Failure `idempotency_key_reused` when it stands for another body. A request that fails or is cancelled frees its key.
    """

    tenant: str
    key: str  # SHA-256 of the caller's key, hex
    body: str  # SHA-256 of what was asked, hex
    request_id: str
    sheet: bytes  # an encoded AnswerSheet
    deadline_ns: int  # the request's


class Recall(Message, frozen=True, kw_only=True):
    """What an Idempotency-Key is bound to, if it is. Fails as `Remember` does."""

    tenant: str
    key: str
    body: str


class Find(Message, frozen=True, kw_only=True):
    """A request of the tenant that carried a key, by its id."""

    tenant: str
    request_id: str


class Remembered(Reply, frozen=True, kw_only=True):
    """`request_id` None = nothing is bound. `new`: this call bound it."""

    request_id: str | None
    sheet: bytes
    new: bool


class Forget(Message, frozen=True, kw_only=True):
    """The request was never enqueued: its key is free again. Idempotent."""

    tenant: str
    request_id: str


class Done(Reply, frozen=True, kw_only=True):
    """Nothing to say but that it happened."""


# ---- the audit (request/reply on audit.<worker>, answered by the worker) -----------------------------------------------


class HeldEntry(Part, frozen=True, kw_only=True):
    """What a worker really keeps of one published entry. `state_bytes` is 0 when only rows stay, for its children."""

    root: bytes
    key: bytes
    state_bytes: int
    kv_bytes: int


class AuditCall(Message, frozen=True, kw_only=True):
    """Which entries do you hold? Paged, so that the answer fits a payload: entries in key order, from `skip` on."""

    skip: int
    limit: int


class AuditReply(Reply, frozen=True, kw_only=True):
    """`entries` = at most `limit` of the `total` that the worker holds (published and reserved ones)."""

    worker_id: str
    epoch: str
    total: int
    entries: tuple[HeldEntry, ...]


BrokerCall = (
    Authenticate
    | Lookup
    | Reserve
    | Commit
    | Abort
    | Lease
    | Release
    | Withdraw
    | Freed
    | Remember
    | Recall
    | Find
    | Forget
)
BrokerReply = Identity | LookupReply | ReserveReply | LeaseReply | WithdrawReply | Remembered | Done
