"""Everything about a request that can be refused before its prompt is made: bounds that are settings, ids outside the
vocabulary, fields that contradict each other. Pure; each refusal names the field and the limit.
"""

from __future__ import annotations

from services.gateway.config import GatewaySettings
from services.gateway.model import ServedModel
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.completions import CompletionRequest
from services.gateway.schemas.fields import GenerationFields
from shared.errors import InvalidRequest


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
    wanted = asked_tokens(fields)
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
        _at_most(fields.prompts, settings.max_prompts, "prompt", "prompts")
        for part in fields.parts():
            prompt = part.single_prompt()
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


def asked_tokens(fields: GenerationFields) -> int | None:
    """The completion budget that was asked for, in either spelling; None = not at all."""
    if isinstance(fields, ChatRequest) and fields.max_completion_tokens is not None:
        return fields.max_completion_tokens
    return fields.max_tokens
