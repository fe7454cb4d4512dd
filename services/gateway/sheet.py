"""What it takes to tell a request's tokens as an answer: made with the request, and kept where a later telling finds it."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from services.gateway.model import ServedModel
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.completions import CompletionRequest
from services.gateway.schemas.fields import GenerationFields
from shared.protocol.messages import AnswerSheet, GenerateRequest, unpack_tokens


def make_sheet(
    request: GenerateRequest, fields: GenerationFields, model: ServedModel, *, route: str
) -> AnswerSheet:
    """The sheet of a resolved request. It holds nothing that the caller would not want kept: a prompt only if the answer
    tells it."""
    prompt = list(unpack_tokens(request.prompt))
    chat = isinstance(fields, ChatRequest)
    echo = isinstance(fields, CompletionRequest) and fields.echoes
    bare = replace(
        request,
        prompt=request.prompt if echo or request.prompt_logprobs is not None else b"",
        namespace=replace(request.namespace, salt=""),
        cache=replace(request.cache, labels=()),
        grammar=UNSET,
    )
    return AnswerSheet(
        request=bare,
        prompt_tokens=len(prompt),
        chat=chat,
        tools=isinstance(fields, ChatRequest) and fields.offers_tools,
        thinking=chat and model.opens_thinking(prompt),
        stops=fields.stops,
        usage_chunk=fields.usage_chunk,
        token_ids=bool(fields.return_token_ids),
        echo=echo,
        prompt_logprobs=fields.prompt_logprobs,
        route=route,
    )
