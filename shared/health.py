"""Health and metrics of a process over HTTP: /healthz, /readyz with its reasons, /metrics. A small ASGI application.

A check returns None when all is well, else the reason in words; readiness is that every check is well within its limit.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from shared.asgi import Application, Receive, Scope, Send, serve

_log = logging.getLogger(__name__)

CHECK_S: Final = 3.0
PATHS: Final = ("/healthz", "/readyz", "/metrics")

Check = Callable[[], Awaitable[str | None]]


async def faults(checks: Mapping[str, Check]) -> dict[str, str]:
    """The reasons of the checks that are not well; a check that fails or takes too long is a reason too."""

    async def one(name: str, check: Check) -> tuple[str, str | None]:
        try:
            async with asyncio.timeout(CHECK_S):
                return name, await check()
        except TimeoutError:
            return name, f"no answer within {CHECK_S:g} s"
        except Exception as error:  # noqa: BLE001 - a probe must answer; the fault itself is logged
            _log.warning("the readiness check %s failed", name, exc_info=True)
            return name, type(error).__name__

    results = await asyncio.gather(*(one(name, check) for name, check in checks.items()))
    return {name: reason for name, reason in results if reason is not None}


async def answer(
    path: str, checks: Mapping[str, Check], registry: CollectorRegistry
) -> tuple[int, str, bytes]:
    """Status, content type and body of one of `PATHS`; a 404 for any other."""
    match path:
        case "/healthz":
            return 200, "application/json", b'{"status":"ok"}'
        case "/readyz":
            reasons = await faults(checks)
            body = {"status": "unready" if reasons else "ready", "reasons": reasons}
            return 503 if reasons else 200, "application/json", json.dumps(body).encode()
        case "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(registry)
        case _:
            return 404, "application/json", b'{"status":"not found"}'


def application(checks: Mapping[str, Check], registry: CollectorRegistry) -> Application:
    """The ASGI application."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        if scope["method"] not in ("GET", "HEAD"):
            status, kind, body = 405, "application/json", b'{"status":"only GET"}'
        else:
            status, kind, body = await answer(scope["path"], checks, registry)
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app


@asynccontextmanager
async def serve_health(
    port: int, checks: Mapping[str, Check], registry: CollectorRegistry, *, host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    """Serve the application while the block runs; yields the port (port 0 takes a free one). Raises Unavailable."""
    async with serve(application(checks, registry), host=host, port=port) as bound:
        yield bound
