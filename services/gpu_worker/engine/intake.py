"""Refuses, before anything is taken, a request that the engine could not serve."""

from __future__ import annotations

from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from shared.errors import ContextLengthExceeded, InvalidRequest

ROOT_BYTES = 32
SEED_LIMIT = 2**64


def check_request(request: GenerateRequest, *, vocab: int, window: int) -> None:
    """`window` = most rows that one sequence can ever get.

    Raises ContextLengthExceeded, which names the window, or InvalidRequest, which names the field.
    """
    prompt = len(request.tokens)
    if prompt < 1:
        raise InvalidRequest("a prompt has at least one token", param="tokens")
    if request.max_tokens < 0:
        raise InvalidRequest("max_tokens is at least 0, which primes and says nothing", param="max_tokens")
    if prompt + request.max_tokens > window:
        raise ContextLengthExceeded(prompt_tokens=prompt, max_tokens=request.max_tokens, window=window)
    if len(request.root) != ROOT_BYTES or len(request.chain) != prompt // BLOCK_ROWS:
        raise InvalidRequest("the chain keys do not fit the prompt", param="chain")
    if len(request.emitted) > request.max_tokens:
        raise InvalidRequest("more tokens were emitted than the budget allows", param="emitted")
    if request.prompt_logprobs is not None and (request.prompt_logprobs < 0 or request.use_cache):
        raise InvalidRequest(
            "prompt log probabilities are counts, and bypass the cache", param="prompt_logprobs"
        )
    if request.reuse == "decode" and not request.use_cache:
        raise InvalidRequest("a turn that bypasses the cache goes on from nothing", param="reuse")
    if request.speculation_k < 0 or (request.top_logprobs or 0) < 0:
        raise InvalidRequest("a count is negative", param="speculation_k")
    _check_ids("tokens", request.tokens, vocab)
    _check_ids("stop_ids", request.stop_ids, vocab)
    _check_ids("last_ids", request.last_ids, vocab)
    _check_ids("emitted", request.emitted, vocab)
    _check_sampling(request.sampling, vocab)


def _check_sampling(params: SamplingParams, vocab: int) -> None:
    ranges = {
        "seed": 0 <= params.seed < SEED_LIMIT,
        "temperature": params.temperature >= 0.0,
        "top_k": params.top_k >= 0,
        "top_p": 0.0 <= params.top_p <= 1.0,
        "min_p": 0.0 <= params.min_p <= 1.0,
        "repetition_penalty": params.repetition_penalty > 0.0,
        "min_tokens": params.min_tokens >= 0,
        "allowed_ids": params.allowed_ids is None or len(params.allowed_ids) > 0,
    }
    for name, good in ranges.items():
        if not good:
            raise InvalidRequest(f"{name} is out of its range", param=name)
    _check_ids("logit_bias", [token for token, _ in params.logit_bias], vocab)
    _check_ids("allowed_ids", params.allowed_ids or (), vocab)
    _check_ids("banned_ids", params.banned_ids, vocab)


def _check_ids(name: str, ids: tuple[int, ...] | frozenset[int] | list[int], vocab: int) -> None:
    if any(not 0 <= token < vocab for token in ids):
        raise InvalidRequest(f"{name} holds an id outside the vocabulary of {vocab}", param=name)
