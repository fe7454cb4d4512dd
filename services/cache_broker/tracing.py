"""SQL statements as child spans of the call that makes them.

The span of a call is made current (`telemetry.attached`) around its handler; the engine's hooks run in a copy of that
context. Attributes name the operation and the row count: no parameters (they hold digests), and no statement text.
"""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind
from sqlalchemy import event
from sqlalchemy.engine import Connection, ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.telemetry import Telemetry, fail


def instrument(engine: AsyncEngine, telemetry: Telemetry) -> None:
    """Record every statement that runs inside a recorded span; outside one (heartbeats, sweeps) nothing is recorded."""

    def before(
        connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> None:
        parent = trace.get_current_span()
        if parent.is_recording() and context is not None:
            context._burstline_span = telemetry.start(
                name_of(statement), parent, {"db.system.name": "postgresql"}, kind=SpanKind.CLIENT
            )

    def after(
        connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> None:
        span: Span | None = getattr(context, "_burstline_span", None)
        if span is not None:
            span.set_attribute("db.response.returned_rows", max(cursor.rowcount, 0))
            span.end()

    def failed(error: ExceptionContext) -> None:
        span: Span | None = getattr(error.execution_context, "_burstline_span", None)
        if span is not None:
            fail(span, error.original_exception)
            span.end()

    event.listen(engine.sync_engine, "before_cursor_execute", before)
    event.listen(engine.sync_engine, "after_cursor_execute", after)
    event.listen(engine.sync_engine, "handle_error", failed)


def name_of(statement: str) -> str:
    """`UPDATE quotas`: the verb and the first table, a name of few values."""
    words = statement.split()
    verb = words[0].upper() if words else "SQL"
    marker = {"SELECT": "FROM", "DELETE": "FROM", "INSERT": "INTO", "UPDATE": "UPDATE"}.get(verb)
    for index, word in enumerate(words[:-1]):
        if word.upper() == marker and not words[index + 1].startswith("("):
            return f"{verb} {words[index + 1].strip('(),;')}"
    return verb
