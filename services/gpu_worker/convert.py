"""Wire values into the engine's, and back. Decides nothing: every parameter was resolved by the gateway (C1.7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import UNSET

from services.gpu_worker.engine import requests as engine
from services.gpu_worker.engine.events import TokenLogprob
from services.gpu_worker.frames import Chunk, Scores
from shared.errors import InvalidRequest
from shared.protocol import messages as wire
from shared.protocol.seeds import choice_seed
from shared.protocol.subjects import PRIORITIES

Tokens: TypeAlias = tuple[int, ...]


def prompt_tokens(request: wire.GenerateRequest) -> Tokens:
    """The prompt's ids. Raises InvalidRequest when there is none, or when the packed bytes are cut."""
    try:
        tokens = wire.unpack_tokens(request.prompt)
    except ValueError as error:
        raise InvalidRequest("the packed prompt is cut", param="prompt") from error
    if not tokens:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if request.choices < 1:
        raise InvalidRequest("choices must be at least 1", param="n")
    return tokens


def sampling_of(sampling: wire.Sampling, choice: int) -> engine.SamplingParams:
    """The parameters of one choice: its own seed, and all else as it came."""
    return engine.SamplingParams(
        seed=choice_seed(sampling.seed, choice),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        allowed_ids=None if sampling.allowed_ids is None else frozenset(sampling.allowed_ids),
        banned_ids=frozenset(sampling.banned_ids),
    )


def engine_requests(
    request: wire.GenerateRequest,
    *,
    engine_id: str,
    root: bytes,
    tokens: Tokens,
    chain: Sequence[bytes],
    emitted: Sequence[Tokens],
    scored: int,
    max_drafts: int,
    journal_stands: bool,
) -> list[engine.GenerateRequest]:
    """One engine request a choice. The prompt is scored by the first one alone: it is the same for all.

    `emitted` are the completion tokens that the journal holds of each choice, `scored` the entries that it has of the
    prompt; once those are all there, nothing is scored again. `max_drafts` is what this worker can
    draft in a round; fewer drafts change the speed and never the tokens (C1). `journal_stands`: what was emitted was decided
    by other numerics than ours.
    """
    scoring = request.prompt_logprobs if scored < len(tokens) - 1 else None
    drafts = min(request.speculation.k, max_drafts) if request.speculation.drafter != "none" else 0
    return [
        engine.GenerateRequest(
            request_id=engine_id,
            choice=choice,
            root=root,
            tokens=tokens,
            chain=tuple(chain),
            sampling=sampling_of(request.sampling, choice),
            max_tokens=request.max_tokens,
            stop_ids=frozenset(request.stop_ids),
            last_ids=frozenset() if request.last_ids is UNSET else frozenset(request.last_ids),
            capture_at=request.cache.capture_at,
            ckpt_at=request.cache.checkpoint_at,
            use_cache=request.cache.enabled and request.prompt_logprobs is None,
            reuse="decode" if request.cache.enabled and request.cache.reuse == "decode" else "exact",
            drafter=request.speculation.drafter,
            speculation_k=drafts,
            top_logprobs=request.top_logprobs,
            prompt_logprobs=scoring if choice == 0 else None,
            party=request.tenant,
            rank=PRIORITIES.index(request.priority),
            labels=request.cache.labels,
            emitted=tuple(emitted[choice]),
            journal_stands=journal_stands,
        )
        for choice in range(request.choices)
    ]


def logprobs_of(values: Sequence[TokenLogprob]) -> tuple[wire.TokenLogprobs, ...]:
    """Log probabilities as frames carry them."""
    return tuple(
        wire.TokenLogprobs(token=value.token, logprob=value.logprob, top=value.top) for value in values
    )


def frame_of(request_id: str, attempt: int, chunk: Chunk | Scores) -> wire.Frame | wire.PromptScores:
    """The message of a chunk."""
    if isinstance(chunk, Scores):
        return wire.PromptScores(
            request_id=request_id, attempt=attempt, offset=chunk.offset, entries=chunk.entries
        )
    return wire.Frame(
        request_id=request_id,
        attempt=attempt,
        choice=chunk.choice,
        offset=chunk.offset,
        tokens=wire.pack_tokens(chunk.tokens),
        logprobs=chunk.logprobs,
    )
