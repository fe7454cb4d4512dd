"""What a caller sent -> a `GenerateRequest` with every parameter decided (C1.7). Workers have no defaults.

Pure. `limits` has refused by now what needed no prompt; here the prompt and the workers are known.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Final

from msgspec import UNSET

from services.gateway.config import GatewaySettings
from services.gateway.limits import asked_tokens
from services.gateway.model import ServedModel
from services.gateway.rendering import Prompt
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.completions import CompletionRequest
from services.gateway.schemas.fields import GenerationFields
from services.gateway.workers import Crew
from shared.control import END_CALL
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.protocol.messages import (
    CachePlan,
    GenerateRequest,
    Identity,
    NamespaceParts,
    Priority,
    Reuse,
    Sampling,
    Speculation,
    pack_tokens,
)

_MASK: Final = (1 << 64) - 1
GREEDY_BELOW: Final = 1e-6
"""A lower temperature is 0: logits over it would leave float32, and what it would pick is the largest one anyway."""
OPEN_WIDTH: Final = 16
"""Drafts a round of drafters that find their own width, where the caller names none; a worker takes as many as it can."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What is known of a request besides its fields."""

    request_id: str
    identity: Identity
    model: ServedModel
    prompt: Prompt
    crew: Crew
    created_ns: int
    deadline_ns: int
    priority: Priority
    grammar: str | None = None  #: what the answer has to follow, tried already


def budget(fields: GenerationFields, prompt_tokens: int, window: int, settings: GatewaySettings) -> int:
    """max_tokens, resolved: as asked, or what is left of the window up to the default (FR-53).

    Raises:
        ContextLengthExceeded: it does not fit; names the three numbers.
    """
    asked = asked_tokens(fields)
    param = "prompt" if isinstance(fields, CompletionRequest) else "messages"
    left = window - prompt_tokens
    least = 0 if asked == 0 else 1
    if left < least or (asked is not None and asked > left):
        raise ContextLengthExceeded(
            prompt_tokens=prompt_tokens,
            max_tokens=1 if asked is None else asked,
            window=window,
            param=param if left < least or asked is None else "max_tokens",
        )
    most = min(left, settings.default_max_tokens) if asked is None else asked
    if fields.min_tokens is not None and fields.min_tokens > most:
        raise InvalidRequest(f"min_tokens is over max_tokens ({most})", param="min_tokens")
    return most


def stop_ids(fields: GenerationFields, model: ServedModel) -> tuple[int, ...]:
    """Ids that end a choice: the model's own, the caller's, and stop strings that spell a control token."""
    ids = set() if fields.ignore_eos else set(model.stop_ids)
    ids.update(fields.stop_token_ids or ())
    control = model.vocabulary.control.ids
    ids.update(control[stop] for stop in fields.stops if stop in control)
    return tuple(sorted(ids))


def last_ids(fields: GenerationFields, model: ServedModel) -> tuple[int, ...]:
    """Ids that end a choice and are part of it: with `parallel_tool_calls: false` the mark that closes a call, so that what
    is said is what would be said without the field, up to the end of the first call."""
    if not isinstance(fields, ChatRequest) or not fields.one_call:
        return ()
    return (model.vocabulary.control.ids[END_CALL],)


def resolve(fields: GenerationFields, admission: Admission, settings: GatewaySettings) -> GenerateRequest:
    """The request that goes on the queue. Raises ContextLengthExceeded and InvalidRequest."""
    model, identity, crew = admission.model, admission.identity, admission.crew
    prompt = admission.prompt
    window = min(model.window, crew.window)
    stops, sampling, scoring = stop_ids(fields, model), _sampling(fields, model), _prompt_logprobs(fields)
    lasts = last_ids(fields, model)
    _check_something_is_left(sampling, stops)
    return GenerateRequest(
        request_id=admission.request_id,
        tenant=identity.tenant,
        key_id=identity.key_id,
        model=model.name,
        namespace=NamespaceParts(
            fingerprint=crew.fingerprint,
            adapter_digest="",
            tenant=identity.tenant,
            salt=fields.cache_salt or "",
        ),
        prompt=pack_tokens(prompt.tokens),
        choices=fields.choices,
        max_tokens=budget(fields, len(prompt.tokens), window, settings),
        stop_ids=stops,
        sampling=sampling,
        top_logprobs=_top_logprobs(fields),
        prompt_logprobs=scoring,
        cache=CachePlan(
            enabled=fields.cache is not False and scoring is None,
            checkpoint_at=prompt.stable,
            capture_at=None,
            labels=_labels(fields),
            reuse=_reuse(fields),
        ),
        speculation=_speculation(fields, crew.leader.speculation),
        priority=admission.priority,
        created_ns=admission.created_ns,
        deadline_ns=admission.deadline_ns,
        grammar=UNSET if admission.grammar is None else admission.grammar,
        last_ids=lasts or UNSET,
    )


def _reuse(fields: GenerationFields) -> Reuse:
    """Decode-made rows are gone on from by those alone who ask for it (C1.3)."""
    if fields.reuse != "decode":
        return "prefill"
    if fields.cache is False:
        raise InvalidRequest("reuse: a request without the cache goes on from nothing", param="reuse")
    return "decode"


def _labels(fields: GenerationFields) -> tuple[str, ...]:
    """Where the conversation may go on, the narrowest first. Digests: what a caller calls its users stays here."""
    named = (("session", fields.session_id), ("key", fields.prompt_cache_key), ("user", fields.user))
    return tuple(
        hashlib.sha256(f"{kind}:{value}".encode()).hexdigest()[:32]
        for kind, value in named
        if value is not None
    )


def _check_something_is_left(sampling: Sampling, stops: tuple[int, ...]) -> None:
    """min_tokens masks the ids that end a choice; with an allow list of nothing else no token could be picked."""
    if (
        sampling.min_tokens > 0
        and sampling.allowed_ids is not None
        and set(sampling.allowed_ids) <= set(stops)
    ):
        raise InvalidRequest(
            "min_tokens forbids every id of allowed_token_ids: all of them end the answer", param="min_tokens"
        )


def _sampling(fields: GenerationFields, model: ServedModel) -> Sampling:
    defaults = model.defaults
    seed = secrets.randbits(64) if fields.seed is None else fields.seed & _MASK
    allowed = fields.allowed_token_ids
    temperature = _given(fields.temperature, defaults.temperature)
    return Sampling(
        seed=seed,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=int(_given(fields.top_k, defaults.top_k)),
        top_p=_given(fields.top_p, defaults.top_p),
        min_p=_given(fields.min_p, defaults.min_p),
        repetition_penalty=_given(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(fields.presence_penalty, 0.0),
        frequency_penalty=_given(fields.frequency_penalty, 0.0),
        logit_bias=tuple(
            sorted((int(name), float(value)) for name, value in (fields.logit_bias or {}).items())
        ),
        min_tokens=fields.min_tokens or 0,
        allowed_ids=None if allowed is None else tuple(sorted(set(allowed))),
        banned_ids=(),
    )


def _given(value: float | None, default: float) -> float:
    return float(default if value is None else value)


def _top_logprobs(fields: GenerationFields) -> int | None:
    if isinstance(fields, ChatRequest):
        return (fields.top_logprobs or 0) if fields.logprobs else None
    return fields.logprobs if isinstance(fields, CompletionRequest) else None


def _prompt_logprobs(fields: GenerationFields) -> int | None:
    """The most that is told of a prompt row: by the echo's log probabilities, or beside the answer."""
    echoed = fields.logprobs if isinstance(fields, CompletionRequest) and fields.echoes else None
    asked = [most for most in (echoed, fields.prompt_logprobs) if most is not None]
    return max(asked, default=None)


def _speculation(fields: GenerationFields, default: Speculation) -> Speculation:
    wanted = fields.speculation
    if wanted is None:
        return default
    if wanted.drafter == "none" or wanted.k == 0:
        return Speculation(drafter="none", k=0)
    if wanted.k is not None:
        return Speculation(drafter=wanted.drafter, k=wanted.k)
    open_width = wanted.drafter in ("auto", "block")
    return Speculation(drafter=wanted.drafter, k=OPEN_WIDTH if open_width else default.k or 1)
