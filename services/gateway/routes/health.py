"""GET /healthz (the process lives), /readyz (it can serve, or why not; FR-123) and /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from services.gateway.service import Gateway
from shared.health import faults


def router(gateway: Gateway) -> APIRouter:
    """Probes."""
    routes = APIRouter()

    @routes.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Always, while the event loop turns."""
        return {"status": "ok"}

    @routes.get("/readyz")
    async def readyz() -> Response:
        """200, or 503 with the reasons."""
        reasons = await faults(gateway.checks())
        body = {"status": "unready" if reasons else "ready", "reasons": reasons}
        return JSONResponse(body, 503 if reasons else 200)

    @routes.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(gateway.telemetry.registry), media_type=CONTENT_TYPE_LATEST)

    return routes
