"""What it takes to tell a request's tokens as an answer: made with the request, and kept where a later telling finds it."""

from __future__ import annotations

from msgspec.structs import replace

from services.gateway.model import ServedModel
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.fields import GenerationFields
from shared.protocol.messages import AnswerSheet, GenerateRequest, unpack_tokens


def make_sheet(
    request: GenerateRequest, fields: GenerationFields, model: ServedModel, *, route: str
) -> AnswerSheet:
    """The sheet of a resolved request. It holds no prompt, and nothing that the caller would not want kept."""
    prompt = list(unpack_tokens(request.prompt))
    chat = isinstance(fields, ChatRequest)
    bare = replace(
        request,
        prompt=b"",
        namespace=replace(request.namespace, salt=""),
        cache=replace(request.cache, labels=()),
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
        route=route,
    )
