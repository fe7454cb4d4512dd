"""GET /v1/models, /v1/models/{id} and /v1/limits."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from services.gateway.middleware import context_of
from services.gateway.model import ServedModel
from services.gateway.service import Gateway
from shared.protocol.messages import Identity


def router(gateway: Gateway) -> APIRouter:
    """What this gateway serves."""
    routes = APIRouter(prefix="/v1")

    async def identify(request: Request) -> Identity:
        context = context_of(request.scope)
        return await gateway.authenticator.identify(request.headers.get("authorization"), context.span)

    @routes.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        """The models that the key may use."""
        identity = await identify(request)
        names = [name for name in gateway.models if not identity.models or name in identity.models]
        return {"object": "list", "data": [_card(gateway, gateway.models[name]) for name in names]}

    @routes.get("/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        """One of them."""
        return _card(gateway, gateway.model(name, await identify(request)))

    @routes.get("/limits")
    async def limits() -> dict[str, int | float]:
        """Every limit of this gateway."""
        return gateway.settings.limits()

    return routes


def _card(gateway: Gateway, model: ServedModel) -> dict[str, Any]:
    """`ready`: a live worker serves it now. Window and vocabulary in tokens."""
    crew = gateway.fleet.crew(model.name)
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "burstline",
        "ready": crew is not None,
        "system_fingerprint": None if crew is None else f"fp_{crew.fingerprint[:16]}",
        "max_model_len": model.window if crew is None else min(model.window, crew.window),
        "vocabulary_size": model.vocabulary.size,
        "tool_calls": model.calls_tools,
        "limits": gateway.settings.limits(),
    }
