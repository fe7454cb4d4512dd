"""GET /healthz (the process lives), /readyz (it can serve, or why not; FR-123) and /metrics, as every service answers them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from services.gateway.service import Gateway
from shared.health import PATHS, answer


def router(gateway: Gateway) -> APIRouter:
    """Probes."""
    routes = APIRouter()

    async def probe(request: Request) -> Response:
        status, kind, body = await answer(request.url.path, gateway.checks(), gateway.telemetry.registry)
        return Response(body, status, media_type=kind)

    for path in PATHS:
        routes.add_api_route(path, probe, methods=["GET"], summary=path.strip("/"))
    return routes
