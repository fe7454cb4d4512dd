"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from services.gateway.generate import GenerationResponse
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.completions import CompletionRequest
from services.gateway.service import Gateway


def router(gateway: Gateway) -> APIRouter:
    """The generation endpoints."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return GenerationResponse(gateway, request, ChatRequest)

    @routes.post("/completions", openapi_extra=_body(CompletionRequest))
    async def complete(request: Request) -> Response:
        """Continue a raw prompt."""
        return GenerationResponse(gateway, request, CompletionRequest)

    return routes


def _body(schema: type[ChatRequest] | type[CompletionRequest]) -> dict[str, Any]:
    """The body's schema for /openapi.json; it is read and validated by our own reader (`body.py`)."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema.model_json_schema()}},
        }
    }
