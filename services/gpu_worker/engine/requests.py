"""What goes into the engine: requests and hits. Plain frozen values, no torch.

Positions are absolute token indices. The *grid* is the multiples of 64; captures, hits and checkpoints lie on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from services.gpu_worker.engine.grammar import Grammar


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


DrafterKind: TypeAlias = Literal["auto", "none", "mtp", "block", "ngram"]
"""What proposes tokens; `auto` = what the worker finds the fastest. It changes how fast a stream comes, never what it
says."""


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
    grammar: Grammar | None = None  #: what the completion has to follow, token by token; null = nothing
    max_tokens: int  #: completion budget, a stop id counts; 0 = only prime
    stop_ids: frozenset[int] = frozenset()  #: EOS is among them unless the request ignores it
    last_ids: frozenset[int] = frozenset()  #: one of them ends the stream too: emitted, never masked
    capture_at: int | None = None  #: shared-prefix boundary worth cutting, floored to the grid
    ckpt_at: int | None = None  #: stable boundary for the next turn, floored to the grid; null = prompt end
    use_cache: bool = True  #: false: no restore and no capture
    reuse: ReuseKind = "exact"
    drafter: DrafterKind = "mtp"  #: a model without an MTP head decodes plainly instead
    speculation_k: int = 0  #: drafts a round; 0 = plain decode
    top_logprobs: int | None = None  #: null = no logprobs; 0 = the chosen token's alone
    prompt_logprobs: int | None = None  #: k best of every prompt row; such a request bypasses the cache
    party: str = ""  #: who it counts for when several share the seats; an opaque label, never a key
    rank: int = 0  #: it takes a seat from its own rank and from larger ones alone
    labels: tuple[str, ...] = ()  #: session, user, narrowest first: nominate a parked session, never a key
    emitted: tuple[int, ...] = ()  #: tokens that an earlier attempt journalled: verified, never emitted again
    journal_stands: bool = False
    """They were decided by other numerics: where the picks differ, they stand (C1.7)."""

    @property
    def key(self) -> tuple[str, int]:
        """What names one stream."""
        return self.request_id, self.choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """The deepest usable entry for a prompt: restoring `key` skips the first `position` tokens."""

    key: bytes
    position: int
