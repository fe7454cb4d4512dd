"""Traces and metrics of one process: OpenTelemetry spans, W3C context over the queue, one Prometheus registry.

Spans are never attached to the running task on their own (FR-119: a span held current across a yield is detached in
another task). A parent is always named: a span, or the context that `extract` read from a message's headers. Work that
another thread did is told afterwards with `record`.

Spans go to an OTLP/HTTP receiver when one is set, else to the local trace store (`shared/tracestore.py`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from shared import logs, spans
from shared.clock import SYSTEM
from shared.config import CommonSettings
from shared.errors import BurstlineError
from shared.spans import Ids, LateSpan, context_of, span_context
from shared.tracestore import StoreExporter, TraceStore

_log = logging.getLogger(__name__)

TASKS: Final = "burstline_process_tasks"
"""Gauge of every process."""

Parent: TypeAlias = spans.Parent
Attributes = Mapping[str, AttributeValue]

TRACES_FILE: Final = "traces.db"
_QUEUE_SPANS: Final = 8192
_BATCH_SPANS: Final = 512
_SCHEDULE_MS: Final = 500
_EXPORT_TIMEOUT_MS: Final = 5000
LAST_EXPORT_S: Final = 2.0
"""Of a process that ends: what the receiver has not taken by then is lost."""

_TRACE: Final = "traceparent"
_propagator: Final = TraceContextTextMapPropagator()


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """What a service holds. Safe from every thread."""

    service: str
    provider: TracerProvider
    tracer: Tracer
    registry: CollectorRegistry
    ids: Ids
    root_sampler: TraceIdRatioBased
    """The verdict on traces that begin here."""

    def inject(self, parent: Parent, headers: MutableMapping[str, str]) -> None:
        """Write `parent` into message headers as W3C trace context; its sampled flag goes along (FR-121)."""
        context = span_context(parent)
        if context is None or not context.is_valid:
            return
        if context.trace_state:
            _propagator.inject(headers, context_of(parent))
        else:
            flags = f"{context.trace_flags:02x}"
            headers[_TRACE] = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags}"

    def headers(self, parent: Parent) -> dict[str, str]:
        """New headers that hold `parent`."""
        carrier: dict[str, str] = {}
        self.inject(parent, carrier)
        return carrier

    def extract(self, headers: Mapping[str, str]) -> Context:
        """The parent that message or HTTP headers name, in any case; an empty context without one or with a bad one."""
        carrier = {name.lower(): value for name, value in headers.items()}
        return _propagator.extract(carrier, Context()) if _TRACE in carrier else Context()

    @contextmanager
    def span(
        self,
        name: str,
        parent: Parent = None,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
    ) -> Iterator[Span]:
        """A span over a block, ended once on every way out; `parent=None` begins a trace. Not made current."""
        span = self.start(name, parent, attributes, kind=kind, links=links)
        try:
            yield span
        except (asyncio.CancelledError, GeneratorExit):
            span.set_attribute("burstline.cancelled", True)
            raise
        except BaseException as error:
            fail(span, error)
            raise
        finally:
            span.end()

    @contextmanager
    def soon(
        self, name: str, parent: Parent, attributes: Attributes | None = None
    ) -> Iterator[dict[str, AttributeValue]]:
        """A span over a block of a task that is nobody's parent, told in the event loop's next turn: what the block is on the
        way to does not wait for the telling. Yields its attributes, which the block may add to. A failed one is told at once.
        """
        told, start_ns = dict(attributes or {}), SYSTEM.wall_ns()
        try:
            yield told
        except BaseException as error:
            span = self.start(name, parent, told, start_ns=start_ns)
            if isinstance(error, asyncio.CancelledError | GeneratorExit):
                span.set_attribute("burstline.cancelled", True)
            else:
                fail(span, error)
            span.end()
            raise
        turn = asyncio.get_running_loop()
        turn.call_soon(self.record, name, parent, start_ns, SYSTEM.wall_ns(), told)

    def start(
        self,
        name: str,
        parent: Parent = None,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        start_ns: int | None = None,
    ) -> Span:
        """A span that the caller ends itself, in a `finally`; OpenTelemetry is told of it then (`LateSpan`). One of a trace
        that is not sampled has ids and records nothing."""
        context = self.ids.child_of(span_context(parent), self._sampled)
        if not context.trace_flags.sampled:
            return trace.NonRecordingSpan(context)
        return LateSpan(
            self.tracer,
            self.ids,
            name,
            parent,
            context,
            kind=kind,
            attributes=attributes,
            links=links,
            start_ns=start_ns,
        )

    def _sampled(self, trace_id: int) -> bool:
        if self.root_sampler.rate >= 1:
            return True
        return self.root_sampler.should_sample(None, trace_id, "").decision is Decision.RECORD_AND_SAMPLE

    def record(
        self,
        name: str,
        parent: Parent,
        start_ns: int,
        end_ns: int,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
    ) -> SpanContext:
        """Tell a span after the fact (wall-clock nanoseconds). Returns its context, a parent for others."""
        span = self.tracer.start_span(
            name,
            context=context_of(parent),
            kind=kind,
            attributes=attributes,
            links=links,
            start_time=start_ns,
            record_exception=False,
            set_status_on_exception=False,
        )
        span.end(max(start_ns, end_ns))
        return span.get_span_context()

    def shutdown(self, timeout_s: float = LAST_EXPORT_S) -> None:
        """Export what has ended, for at most `timeout_s`, and stop. Idempotent; spans told later are dropped.

        In a thread of its own, which ends with the process: the SDK's own limits add up to 40 s where a receiver hangs.
        """
        ending = threading.Thread(target=self.provider.shutdown, name="last-export", daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            _log.warning("spans: the last export took more than %g s and was left", timeout_s)


@contextmanager
def attached(span: Span) -> Iterator[None]:
    """Make `span` current for library instrumentation (SQL). Only around blocks that cannot yield to a consumer."""
    with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
        yield


def trace_id(parent: Parent) -> str:
    """The trace id as 32 hex digits, "" when there is none."""
    context = span_context(parent)
    return format(context.trace_id, "032x") if context is not None and context.is_valid else ""


def fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed by type and code. The message stays out: it could quote what a caller sent."""
    code = error.code if isinstance(error, BurstlineError) else type(error).__name__
    span.set_status(Status(StatusCode.ERROR, code))
    span.set_attribute("error.type", code)


def setup(service: str, common: CommonSettings, *, logging: bool = True) -> Telemetry:
    """Set up a process: spans, the metrics registry and, unless `logging` is False, the root logger."""
    if logging:
        logs.setup(service, level=common.log_level, style=common.log_format)
    if common.otlp_endpoint is None:
        exporter: SpanExporter = StoreExporter(TraceStore(common.data_dir / TRACES_FILE))
    else:
        exporter = _otlp(common.otlp_endpoint)
    return build(service, exporter, sample_ratio=common.trace_sample_ratio)


def build(service: str, exporter: SpanExporter | None, *, sample_ratio: float = 1.0) -> Telemetry:
    """Telemetry with a given exporter; None keeps spans (for contexts and ids) and exports nothing.

    `sample_ratio` of the traces that begin here are kept; one that came with a message or a caller is kept or not as
    its flag says, so that a trace is whole or not there.
    """
    ids, root_sampler = Ids(), TraceIdRatioBased(sample_ratio)
    provider = TracerProvider(
        sampler=ParentBased(root_sampler),
        id_generator=ids,
        resource=Resource({"service.name": service}),
        span_limits=SpanLimits(max_attributes=64, max_events=64, max_links=16, max_attribute_length=4096),
        shutdown_on_exit=False,
    )
    if exporter is not None:
        processor = BatchSpanProcessor(
            exporter,
            max_queue_size=_QUEUE_SPANS,
            max_export_batch_size=_BATCH_SPANS,
            schedule_delay_millis=_SCHEDULE_MS,
            export_timeout_millis=_EXPORT_TIMEOUT_MS,
        )
        provider.add_span_processor(processor)
    return Telemetry(
        service=service,
        provider=provider,
        tracer=provider.get_tracer("burstline"),
        registry=_registry(),
        ids=ids,
        root_sampler=root_sampler,
    )


def _otlp(endpoint: str) -> SpanExporter:
    """The OTLP/HTTP exporter; imported late, as it brings an HTTP client that the local store does not need."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_TIMEOUT_MS / 1000)


def _registry() -> CollectorRegistry:
    """A registry of this process alone; a global one would fail on a second set-up in the same process."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_Tasks())
    return registry


class _Tasks(Collector):
    """Tasks of the event loop that answers the scrape; nothing where there is none. What grows without load is a leak (C6)."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        try:
            tasks = asyncio.all_tasks()
        except RuntimeError:
            return
        yield GaugeMetricFamily(TASKS, "Tasks of the event loop that are not done.", value=len(tasks))
