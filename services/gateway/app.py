"""The gateway as an ASGI application, and as a process."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp

from services.gateway import faults
from services.gateway.config import GatewaySettings
from services.gateway.middleware import Surround, context_of
from services.gateway.openapi import Application
from services.gateway.routes import completions, health, models, streams
from services.gateway.service import Gateway, load_models, read_vocabularies
from shared import telemetry
from shared.asgi import serve
from shared.config import CommonSettings
from shared.errors import BurstlineError
from shared.lifecycle import Shutdown, drain_on_signals, keep_what_is_loaded
from shared.telemetry import Telemetry
from shared.transport.access import Access
from shared.transport.nats import connect

_log = logging.getLogger(__name__)
_LAST_WORDS_S = 2.0
"""What streams that did not end in time get to say so."""


def create_app(gateway: Gateway) -> ASGIApp:
    """The application around `gateway`, which must be `running` while it serves. Generations pass by the framework."""
    app = Application(title="Burstline", redirect_slashes=False)
    app.include_router(completions.router())
    for group in (streams, models, health):
        app.include_router(group.router(gateway))
    app.add_exception_handler(BurstlineError, _refuse)
    app.add_exception_handler(HTTPException, _http_error)
    generations = completions.Generations(app, gateway=gateway, refuse=_refuse)
    return Surround(generations, telemetry=gateway.telemetry, metrics=gateway.metrics, clock=gateway.clock)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """Our own errors, in OpenAI's shape."""
    known = error if isinstance(error, BurstlineError) else BurstlineError("internal error")
    telemetry.fail(context_of(request.scope).span, known)
    return JSONResponse(faults.body(known), known.status, headers=faults.headers(known))


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    """Errors of the framework: no such path, wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    extra = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    told = {
        404: "there is nothing at this path; /openapi.json lists what there is",
        405: f"this path takes {extra.get('Allow', 'another method')}",
    }
    body = {
        "message": told.get(status, HTTPStatus(status).phrase),
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": None,
        "code": {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error"),
    }
    return JSONResponse({"error": body}, status, headers=extra)


async def run(settings: GatewaySettings, common: CommonSettings, told: Telemetry) -> None:
    """Serve until a signal, then drain.

    Raises:
        Unavailable: NATS does not answer, or the address is taken.
        ModelFolderError: a model folder cannot be served.
        TaskDied: a background task ended; a supervisor should start the process again.
    """
    models = load_models(settings)
    read_vocabularies(models)
    async with drain_on_signals() as drain, Shutdown() as shutdown:
        transport = await connect(common.nats_url, name="burstline-gateway", access=Access.of(common))
        shutdown.push("transport", transport.close)
        gateway = Gateway(settings, transport, told, models)
        listen = serve(
            create_app(gateway),
            host=settings.host,
            port=settings.port,
            drain_s=settings.drain_s + _LAST_WORDS_S,
        )
        async with gateway.running(), listen as port:
            keep_what_is_loaded()
            _log.info("listening on %s:%d, models: %s", settings.host, port, ", ".join(models))
            await drain.wait()
            gateway.draining = True
            await asyncio.sleep(settings.drain_notice_s)
            gateway.begin_end()
