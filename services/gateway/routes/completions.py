"""POST /v1/chat/completions and /v1/completions.

Their way in is `Generations`, before the framework: of the time to a first token its own machinery for a request (which these
read, check and answer by themselves) would be a noticeable part. The routes stand for the rest of the framework: other methods,
and the description of the API.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.generate import Generate
from services.gateway.openapi import request_body
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.completions import CompletionRequest
from services.gateway.service import Gateway
from shared.errors import BurstlineError, NotFound

Refuse: TypeAlias = Callable[[Request, Exception], Awaitable[Response]]

_PASSED: Final = "a generation came past its way in"
_SCHEMAS: Final[dict[str, type[ChatRequest | CompletionRequest]]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}


class Generations:
    """Takes the requests that generate; all others go on to `app`."""

    def __init__(self, app: ASGIApp, *, gateway: Gateway, refuse: Refuse) -> None:
        """`refuse` makes the response of an error of ours."""
        self._app: Final = app
        self._ways: Final = {path: Generate(gateway, schema) for path, schema in _SCHEMAS.items()}
        self._refuse: Final = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["type"] == "http" and scope["method"] == "POST"
        generate = self._ways.get(scope["path"]) if generates else None
        if generate is None:
            await self._app(scope, receive, send)
            return
        try:
            await generate(scope, receive, send)
        except BurstlineError as error:  # raised before anything was sent: a stream tells its own in band
            response = await self._refuse(Request(scope, receive, send), error)
            await response(scope, receive, send)


def router() -> APIRouter:
    """What the framework says of the generation endpoints; `Generations` is what answers."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/chat/completions", openapi_extra=request_body(ChatRequest))
    async def chat() -> Response:
        """Answer a conversation."""
        raise NotFound(_PASSED)

    @routes.post("/completions", openapi_extra=request_body(CompletionRequest))
    async def complete() -> Response:
        """Continue a raw prompt."""
        raise NotFound(_PASSED)

    return routes
