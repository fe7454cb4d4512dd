"""Spans that are told when they end: the same ids, and all that was said of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from shared import telemetry
from shared.spans import LateSpan
from shared.telemetry import Telemetry

REMOTE = "00-" + "ab" * 16 + "-" + "cd" * 8


class Kept:
    """Telemetry, and what has ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tool: Telemetry = telemetry.build("test", None)
        self.tool.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def only(self) -> ReadableSpan:
        (span,) = self.exporter.get_finished_spans()
        return span


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.tool.shutdown()


def test_a_span_has_its_context_from_the_beginning_to_the_export(kept: Kept) -> None:
    parent = kept.tool.extract({"traceparent": f"{REMOTE}-03", "tracestate": "a=b"})
    span = kept.tool.start("work", parent, {"n": 1}, kind=SpanKind.SERVER, start_ns=1_000)
    context = span.get_span_context()
    headers = kept.tool.headers(span)
    span.end(2_000)
    told = kept.only()
    assert told.context == context
    assert headers["traceparent"] == f"00-{'ab' * 16}-{context.span_id:016x}-03"
    assert headers["tracestate"] == "a=b"
    assert told.parent is not None
    assert told.parent.span_id == int("cd" * 8, 16)
    assert (told.name, told.kind, told.start_time, told.end_time) == ("work", SpanKind.SERVER, 1_000, 2_000)
    assert told.attributes == {"n": 1}


def test_a_trace_that_begins_here_keeps_its_id(kept: Kept) -> None:
    span = kept.tool.start("root")
    context = span.get_span_context()
    span.end()
    told = kept.only()
    assert (told.context, told.parent) == (context, None)
    assert context.trace_flags == 3  # sampled, and random


def test_all_that_was_said_of_a_span_is_told(kept: Kept) -> None:
    linked = kept.tool.record("other", None, 1, 2)
    span = kept.tool.start("work", links=[Link(linked)])
    span.set_attribute("a", 1)
    span.set_attributes({"a": 2, "b": "x"})
    span.add_event("seen", {"at": 1}, 1_500)
    span.add_link(linked)
    span.update_name("renamed")
    span.record_exception(ValueError("a prompt"))
    span.set_status(Status(StatusCode.ERROR, "why"))
    assert span.is_recording()
    span.end()
    told = next(one for one in kept.exporter.get_finished_spans() if one.name == "renamed")
    assert told.attributes == {"a": 2, "b": "x"}
    assert [(one.name, one.attributes) for one in told.events] == [
        ("seen", {"at": 1}),
        ("exception", {"exception.type": "ValueError"}),
    ]
    assert told.events[0].timestamp == 1_500
    assert len(told.links) == 2
    assert (told.status.status_code, told.status.description) == (StatusCode.ERROR, "why")
    assert "a prompt" not in told.to_json()


def test_a_span_ends_once_and_hears_nothing_after(kept: Kept) -> None:
    span = kept.tool.start("work")
    span.end(5)
    span.set_attribute("late", True)
    span.add_event("late")
    span.end(6)
    assert not span.is_recording()
    told = kept.only()
    assert told.attributes == {}
    assert told.events == ()


def test_ids_are_apart_in_threads_and_after_a_span_was_told(kept: Kept) -> None:
    spans = [kept.tool.start(str(number)) for number in range(8)]
    threads = [threading.Thread(target=span.end) for span in spans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    contexts = {span.get_span_context().span_id for span in spans} | {
        kept.tool.record("r", None, 1, 2).span_id
    }
    told = kept.exporter.get_finished_spans()
    assert {one.context.span_id for one in told if one.context is not None} == contexts
    assert len(contexts) == 9


def test_an_unsampled_span_is_none_of_them(kept: Kept) -> None:
    span = kept.tool.start("work", kept.tool.extract({"traceparent": f"{REMOTE}-00"}))
    assert not isinstance(span, LateSpan)
    assert not span.is_recording()
