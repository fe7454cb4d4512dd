"""GET /v1/streams/{request}: go on reading a stream whose connection broke."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from services.gateway.resume import ResumeResponse
from services.gateway.service import Gateway


def router(gateway: Gateway) -> APIRouter:
    """Streams of requests that carried an Idempotency-Key."""
    routes = APIRouter(prefix="/v1")

    @routes.get("/streams/{request_id}")
    async def resume(request_id: str, request: Request) -> Response:
        """The stream after Last-Event-ID, or all of it."""
        return ResumeResponse(gateway, request, request_id)

    return routes
