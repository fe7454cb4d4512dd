"""What surrounds every request: ids, the root span, figures, and the last catch. Pure ASGI (FR-71): nothing stands
between an endpoint and the caller's disconnect."""

from __future__ import annotations

import logging
import re
import secrets
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import faults
from services.gateway.connection import CallerGone
from services.gateway.metrics import Metrics
from shared import logs, telemetry
from shared.clock import Clock
from shared.errors import BurstlineError
from shared.telemetry import Telemetry

_log = logging.getLogger(__name__)
_LABEL: Final = re.compile(r"^[\x21-\x7e]{1,128}$")
_KEY: Final = "burstline"
_ROUTES: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/limits", "/healthz", "/readyz", "/metrics"}
)


@dataclass(kw_only=True)
class RequestContext:
    """What goes with a request. `request_id` is ours and unique (of a reader who comes back: the one that it reads); the
    caller's label is only echoed (FR-65)."""

    request_id: str
    label: str
    span: Span
    trace_id: str
    started_ns: int
    started_wall_ns: int
    headers: dict[str, str] = field(default_factory=dict)


def route_of(path: str) -> str:
    """The path as a label: one of ours, or "other"."""
    if path in _ROUTES:
        return path
    for prefix in ("/v1/models/", "/v1/streams/"):
        if path.startswith(prefix):
            return prefix + "{id}"
    return "other"


def context_of(scope: Scope) -> RequestContext:
    """The context of a request."""
    found: RequestContext = scope["state"][_KEY]
    return found


class Surround:
    """The outermost application."""

    def __init__(self, app: ASGIApp, *, telemetry: Telemetry, metrics: Metrics, clock: Clock) -> None:
        self._app: Final = app
        self._telemetry: Final = telemetry
        self._metrics: Final = metrics
        self._clock: Final = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fields = reversed(scope["headers"])  # of one that is there twice the first counts
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in fields}
        context = self._context(self._span(scope, headers), headers)
        scope.setdefault("state", {})[_KEY] = context
        logs.bind_trace(context.trace_id)
        await self._run(scope, receive, _Watched(send, context))

    def _span(self, scope: Scope, headers: dict[str, str]) -> Span:
        """The root span; probes and figures make none, or they would be most of every trace store."""
        if not scope["path"].startswith("/v1/"):
            return INVALID_SPAN
        return self._telemetry.start(
            f"{scope['method']} {route_of(scope['path'])}",
            self._telemetry.extract(headers),
            kind=SpanKind.SERVER,
        )

    def _context(self, span: Span, headers: dict[str, str]) -> RequestContext:
        request_id = secrets.token_hex(16)
        label = headers.get("x-request-id", "")
        return RequestContext(
            request_id=request_id,
            label=label if _LABEL.match(label) else request_id,
            span=span,
            trace_id=telemetry.trace_id(span),
            started_ns=self._clock.monotonic_ns(),
            started_wall_ns=self._clock.wall_ns(),
            headers=headers,
        )

    async def _run(self, scope: Scope, receive: Receive, send: _Watched) -> None:
        context = send.context
        status = 499
        try:
            await self._guarded(scope, receive, send)
            status = send.status
        except CallerGone:
            context.span.set_attribute("burstline.cancelled", True)
            _log.info("499: the caller of %s left", context.request_id)
        finally:
            route = route_of(scope["path"])
            seconds = (self._clock.monotonic_ns() - context.started_ns) / 1e9
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(seconds)
            context.span.set_attributes(
                {
                    "http.request.method": scope["method"],
                    "url.path": scope["path"][:256],
                    "http.response.status_code": status,
                }
            )
            context.span.end()

    async def _guarded(self, scope: Scope, receive: Receive, send: _Watched) -> None:
        """An exception that nobody foresaw is a 500 without its text, and a line in the log with it."""
        try:
            await self._app(scope, receive, send)
        except CallerGone:
            raise
        except Exception as error:  # noqa: BLE001 - the last catch of the process; it is logged with its stack
            telemetry.fail(send.context.span, error)
            _log.exception("request %s failed", send.context.request_id)
            if send.status == 0:
                await send_error(send, BurstlineError("internal error"))


class _Watched:
    """`send` that adds our headers and remembers the status (0 = nothing sent yet)."""

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send: Final = send
        self.context: Final = context
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ours = [
                (b"x-request-id", self.context.label.encode("latin-1")),
                (b"x-burstline-request-id", self.context.request_id.encode()),
            ]
            if self.context.trace_id:
                ours.append((b"x-trace-id", self.context.trace_id.encode()))
            message = {**message, "headers": [*message.get("headers", []), *ours]}
        await self._send(message)


async def send_error(send: Send, error: BurstlineError) -> None:
    """A whole error response."""
    await send_json(send, error.status, faults.body(error), faults.headers(error))


async def send_json(send: Send, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
    """A whole JSON response."""
    data = msgspec.json.encode(body)
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    head += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": data})
