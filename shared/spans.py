"""Spans that cost little where they begin: an id and a verdict. All else is told to OpenTelemetry when they end.

A request's first token waits for the beginning of its spans (their ids travel with messages), and for nothing of their end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer
from opentelemetry.util.types import AttributeValue

from shared.clock import SYSTEM

Parent = Span | SpanContext | Context | None


def context_of(parent: Parent) -> Context:
    """`parent` as an OpenTelemetry context. None is the empty one: what runs in the task by chance is no parent."""
    match parent:
        case None:
            return Context()
        case Span():
            return trace.set_span_in_context(parent, Context())
        case SpanContext():
            return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
        case _:
            return parent


def span_context(parent: Parent) -> SpanContext | None:
    """Who `parent` is."""
    match parent:
        case None | SpanContext():
            return parent
        case Span():
            return parent.get_span_context()
        case _:
            return trace.get_current_span(parent).get_span_context()


class Ids(IdGenerator):
    """Random ids; or those of a span that has its own already, while the thread tells it."""

    def __init__(self) -> None:
        self._random: Final = RandomIdGenerator()
        self._told: Final = threading.local()

    def tell(self, context: SpanContext | None) -> None:
        """From now on this thread tells that span; None = no span with ids of its own."""
        self._told.context = context

    def generate_trace_id(self) -> int:
        context: SpanContext | None = getattr(self._told, "context", None)
        return self._random.generate_trace_id() if context is None else context.trace_id

    def generate_span_id(self) -> int:
        context: SpanContext | None = getattr(self._told, "context", None)
        return self._random.generate_span_id() if context is None else context.span_id

    def is_trace_id_random(self) -> bool:
        return True

    def child_of(self, parent: SpanContext | None, sampled: Callable[[int], bool]) -> SpanContext:
        """The context of a new span; `sampled` is the verdict on a trace id, asked where a trace begins with it."""
        if parent is not None and parent.is_valid:
            known = TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID
            flags, state, trace_id = parent.trace_flags & known, parent.trace_state, parent.trace_id
        else:
            state, trace_id = None, self._random.generate_trace_id()
            flags = TraceFlags.RANDOM_TRACE_ID | (TraceFlags.SAMPLED if sampled(trace_id) else 0)
        return SpanContext(
            trace_id,
            self._random.generate_span_id(),
            is_remote=False,
            trace_flags=TraceFlags(flags),
            trace_state=state,
        )


class LateSpan(Span):
    """A sampled span. It becomes one of the SDK's when it ends; what is told of it later is dropped."""

    def __init__(
        self,
        tracer: Tracer,
        ids: Ids,
        name: str,
        parent: Parent,
        context: SpanContext,
        *,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue] | None,
        links: Sequence[Link],
        start_ns: int | None,
    ) -> None:
        """`context` is its own, `parent` what it hangs on."""
        self._tracer: Final = tracer
        self._ids: Final = ids
        self._name = name
        self._parent: Final = parent
        self._context: Final = context
        self._kind: Final = kind
        self._attributes: dict[str, AttributeValue] = dict(attributes or {})
        self._links: Final = list(links)
        self._start_ns: Final = SYSTEM.wall_ns() if start_ns is None else start_ns
        self._events: list[tuple[str, Mapping[str, AttributeValue] | None, int]] = []
        self._status: Status | None = None
        self._ended = False

    def get_span_context(self) -> SpanContext:
        return self._context

    def is_recording(self) -> bool:
        return not self._ended

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        if not self._ended:
            self._attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        if not self._ended:
            self._attributes.update(attributes)

    def add_event(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue] | None = None,
        timestamp: int | None = None,
    ) -> None:
        if not self._ended:
            self._events.append((name, attributes, SYSTEM.wall_ns() if timestamp is None else timestamp))

    def add_link(self, context: SpanContext, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        if not self._ended:
            self._links.append(Link(context, attributes))

    def update_name(self, name: str) -> None:
        if not self._ended:
            self._name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if not self._ended:
            self._status = status if isinstance(status, Status) else Status(status, description)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, AttributeValue] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Its type alone: the message could quote what a caller sent."""
        self.add_event(
            "exception", {**(attributes or {}), "exception.type": type(exception).__name__}, timestamp
        )

    def end(self, end_time: int | None = None) -> None:
        """Tell it. Idempotent."""
        if self._ended:
            return
        self._ended = True
        end_ns = SYSTEM.wall_ns() if end_time is None else end_time
        self._ids.tell(self._context)
        try:
            span = self._tracer.start_span(
                self._name,
                context=context_of(self._parent),
                kind=self._kind,
                attributes=self._attributes,
                links=self._links,
                start_time=self._start_ns,
                record_exception=False,
                set_status_on_exception=False,
            )
        finally:
            self._ids.tell(None)
        for name, attributes, at_ns in self._events:
            span.add_event(name, attributes, at_ns)
        if self._status is not None:
            span.set_status(self._status)
        span.end(end_ns)
