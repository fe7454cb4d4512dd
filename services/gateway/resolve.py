"""What a caller sent -> a `GenerateRequest` with every parameter decided (C1.7). Workers have no defaults.

Two steps, both pure: `check_limits` before anything is rendered, `resolve` when the prompt and the workers are known.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Final

from services.gateway.config import GatewaySettings
from services.gateway.model import ServedModel
from services.gateway.rendering import Prompt
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.completions import CompletionRequest
from services.gateway.schemas.fields import GenerationFields
from services.gateway.workers import Crew
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


def check_limits(fields: GenerationFields, model: ServedModel, settings: GatewaySettings) -> None:
    """Everything that needs no prompt. Raises InvalidRequest with the field and the limit (FR-56, FR-57)."""
    _at_most(fields.choices, settings.max_choices, "n")
    _check_stops(fields, settings)
    _check_ids(fields, model, settings)
    if fields.top_k is not None:
        _at_most(fields.top_k, model.vocabulary.size, "top_k")
    if fields.speculation is not None and fields.speculation.k is not None:
        _at_most(fields.speculation.k, settings.max_speculation, "speculation.k")
    if fields.stream_options is not None and not fields.streamed:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    wanted = _asked_tokens(fields)
    if wanted is not None and fields.min_tokens is not None and fields.min_tokens > wanted:
        raise InvalidRequest(f"min_tokens is over max_tokens ({wanted})", param="min_tokens")
    if isinstance(fields, ChatRequest):
        _check_chat(fields, model, settings)
    elif isinstance(fields, CompletionRequest) and fields.logprobs is not None:
        _at_most(fields.logprobs, settings.max_logprobs, "logprobs")
    _check_scoring(fields, settings)


def _check_scoring(fields: GenerationFields, settings: GatewaySettings) -> None:
    """The prompt's own log probabilities, and answers that consist of the prompt alone."""
    if fields.prompt_logprobs is not None:
        _at_most(fields.prompt_logprobs, settings.max_logprobs, "prompt_logprobs")
        if fields.streamed:
            raise InvalidRequest(
                "prompt_logprobs come with the whole answer; a stream tells them by echo and logprobs",
                param="prompt_logprobs",
            )
    tells_prompt = isinstance(fields, CompletionRequest) and fields.echoes
    if fields.max_tokens == 0 and not tells_prompt and fields.prompt_logprobs is None:
        raise InvalidRequest(
            "max_tokens is at least 1, unless the prompt is told (echo) or scored (prompt_logprobs)",
            param="max_tokens",
        )


def _check_stops(fields: GenerationFields, settings: GatewaySettings) -> None:
    _at_most(len(fields.stops), settings.max_stop, "stop", "strings")
    for stop in fields.stops:
        if not stop:
            raise InvalidRequest("a stop string may not be empty", param="stop")
        _at_most(len(stop), settings.max_stop_characters, "stop", "characters")


def _check_ids(fields: GenerationFields, model: ServedModel, settings: GatewaySettings) -> None:
    bias = fields.logit_bias or {}
    _at_most(len(bias), settings.max_logit_bias, "logit_bias", "entries")
    for name in bias:
        if not name.isascii() or not name.isdigit() or len(name) > 10:
            raise InvalidRequest("keys of logit_bias are token ids", param="logit_bias")
        _in_vocabulary(int(name), model, "logit_bias")
    if len({int(name) for name in bias}) != len(bias):
        raise InvalidRequest("a token id stands twice in logit_bias", param="logit_bias")
    for param, ids, most in (
        ("stop_token_ids", fields.stop_token_ids, settings.max_stop_ids),
        ("allowed_token_ids", fields.allowed_token_ids, settings.max_allowed_ids),
    ):
        _at_most(len(ids or ()), most, param, "ids")
        for token in ids or ():
            _in_vocabulary(token, model, param)
    if isinstance(fields, CompletionRequest):
        prompt = fields.single_prompt()
        if isinstance(prompt, list):
            _in_vocabulary(max(prompt), model, "prompt")


def _check_chat(fields: ChatRequest, model: ServedModel, settings: GatewaySettings) -> None:
    _at_most(len(fields.messages), settings.max_messages, "messages", "messages")
    _at_most(len(fields.tools or ()), settings.max_tools, "tools", "tools")
    if fields.top_logprobs is not None:
        if not fields.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        _at_most(fields.top_logprobs, settings.max_logprobs, "top_logprobs")
    if fields.tool_choice is not None and not fields.tools:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    if fields.offers_tools and not model.calls_tools:
        raise InvalidRequest(f"model {model.name} has no tokens for tool calls", param="tools")
    both = (fields.max_tokens, fields.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_completion_tokens")


def _at_most(value: int, most: int, param: str, unit: str = "") -> None:
    if value > most:
        raise InvalidRequest(
            f"{param} may be at most {most}{' ' + unit if unit else ''}, not {value}", param=param
        )


def _in_vocabulary(token: int, model: ServedModel, param: str) -> None:
    if token >= model.vocabulary.size:
        raise InvalidRequest(f"{param}: ids are below {model.vocabulary.size}, the vocabulary", param=param)


def _asked_tokens(fields: GenerationFields) -> int | None:
    if isinstance(fields, ChatRequest) and fields.max_completion_tokens is not None:
        return fields.max_completion_tokens
    return fields.max_tokens


def budget(fields: GenerationFields, prompt_tokens: int, window: int, settings: GatewaySettings) -> int:
    """max_tokens, resolved: as asked, or what is left of the window up to the default (FR-53).

    Raises:
        ContextLengthExceeded: it does not fit; names the three numbers.
    """
    asked = _asked_tokens(fields)
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


def resolve(fields: GenerationFields, admission: Admission, settings: GatewaySettings) -> GenerateRequest:
    """The request that goes on the queue. Raises ContextLengthExceeded and InvalidRequest."""
    model, identity, crew = admission.model, admission.identity, admission.crew
    prompt = admission.prompt
    window = min(model.window, crew.window)
    stops, sampling, scoring = stop_ids(fields, model), _sampling(fields, model), _prompt_logprobs(fields)
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
    return Speculation(drafter=wanted.drafter, k=default.k or 1 if wanted.k is None else wanted.k)
