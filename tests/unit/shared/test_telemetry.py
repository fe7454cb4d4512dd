"""Spans: named parents, context over headers and threads, one end on every way out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link
from prometheus_client import Counter, generate_latest

from shared import telemetry
from shared.config import CommonSettings
from shared.errors import FencedOut
from shared.telemetry import Telemetry
from shared.tracestore import TraceStore

PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


class Recorded:
    """Telemetry and what it exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.telemetry = telemetry.build("test", None)
        self.telemetry.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def spans(self) -> dict[str, ReadableSpan]:
        finished = self.exporter.get_finished_spans()
        assert len({span.name for span in finished}) == len(finished), "a span was ended twice"
        return {span.name: span for span in finished}


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    made = Recorded()
    yield made
    made.telemetry.shutdown()


def test_fr_117_a_span_over_the_queue_has_the_senders_trace(recorded: Recorded) -> None:
    tool = recorded.telemetry
    with tool.span("sender") as sender:
        headers = tool.headers(sender)
    with tool.span("receiver", tool.extract(headers)):
        pass
    spans = recorded.spans()
    assert spans["receiver"].parent is not None
    assert spans["receiver"].parent.span_id == spans["sender"].get_span_context().span_id  # type: ignore[union-attr]
    assert telemetry.trace_id(tool.extract(headers)) == headers["traceparent"].split("-")[1]


@pytest.mark.parametrize(("ratio", "flag", "kept"), [(0.0, "01", True), (1.0, "00", False)])
def test_fr_121_the_ratio_is_for_traces_that_begin_here_and_others_keep_their_flag(
    ratio: float, flag: str, kept: bool
) -> None:
    tool = telemetry.build("test", None, sample_ratio=ratio)
    with tool.span("ours") as ours:
        assert sampled(tool.headers(ours)) is bool(ratio)  # the verdict travels
    with tool.span("theirs", tool.extract({"traceparent": PARENT[:-2] + flag})) as theirs:
        assert sampled(tool.headers(theirs)) is kept
        assert theirs.is_recording() is kept
    tool.shutdown()


def sampled(headers: dict[str, str]) -> bool:
    """The flag; others stand in the same byte."""
    return bool(int(headers["traceparent"].rpartition("-")[2], 16) & 1)


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
def test_fr_117_a_callers_context_is_taken_in_any_case(recorded: Recorded, name: str) -> None:
    assert telemetry.trace_id(recorded.telemetry.extract({name: PARENT})) == "ab" * 16


@pytest.mark.parametrize("bad", ["", "x", PARENT[:-1], "00-" + "0" * 32 + "-" + "cd" * 8 + "-01", "00-é"])
def test_a_bad_context_is_none(recorded: Recorded, bad: str) -> None:
    assert telemetry.trace_id(recorded.telemetry.extract({"traceparent": bad})) == ""


def test_fr_121_an_unsampled_trace_stays_unsampled_over_every_hop(recorded: Recorded) -> None:
    tool = recorded.telemetry
    headers = {"traceparent": PARENT[:-2] + "00"}
    for hop in range(3):
        with tool.span(f"hop {hop}", tool.extract(headers)) as span:
            headers = tool.headers(span)
        assert headers["traceparent"].endswith("-00")
        assert "ab" * 16 in headers["traceparent"]
    assert recorded.spans() == {}


def test_a_span_without_a_parent_begins_a_trace_whatever_is_current(recorded: Recorded) -> None:
    tool = recorded.telemetry
    with tool.span("current") as current, telemetry.attached(current):
        assert trace.get_current_span() is current
        with tool.span("root"):
            pass
    assert recorded.spans()["root"].parent is None
    assert not trace.get_current_span().get_span_context().is_valid


async def test_fr_119_a_span_across_yields_is_ended_once_on_a_disconnect(
    recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    tool = recorded.telemetry

    async def stream() -> object:
        with tool.span("stream"):
            for index in range(100):
                yield index
                await asyncio.sleep(0)

    one = stream()
    await anext(one)  # type: ignore[call-overload]
    await asyncio.create_task(one.aclose())  # type: ignore[attr-defined]  # another task closes it
    span = recorded.spans()["stream"]
    assert span.attributes == {"burstline.cancelled": True}
    assert span.status.is_ok
    assert caplog.records == []


async def test_a_cancelled_span_is_told_as_cancelled(recorded: Recorded) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        with recorded.telemetry.span("work"):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert recorded.spans()["work"].attributes == {"burstline.cancelled": True}


def test_a_failed_span_tells_the_code_and_not_the_message(recorded: Recorded) -> None:
    def fail_in(name: str, error: Exception) -> None:
        with recorded.telemetry.span(name):
            raise error

    with pytest.raises(FencedOut):
        fail_in("ours", FencedOut("the prompt was hello"))
    with pytest.raises(KeyError):
        fail_in("foreign", KeyError("hello"))
    spans = recorded.spans()
    assert spans["ours"].status.description == "fenced_out"
    assert spans["foreign"].status.description == "KeyError"
    assert "hello" not in spans["ours"].to_json() + spans["foreign"].to_json()


def test_fr_122_another_thread_tells_its_work_after_the_fact(recorded: Recorded) -> None:
    tool = recorded.telemetry
    with tool.span("request") as request:

        def engine() -> None:
            burst = tool.record("burst", request, 1_000, 2_000, {"drafted": 3})
            tool.record("verify", burst, 1_500, 1_400, links=[Link(burst)])

        thread = threading.Thread(target=engine)
        thread.start()
        thread.join()
    spans = recorded.spans()
    assert (spans["burst"].start_time, spans["burst"].end_time) == (1_000, 2_000)
    assert (spans["verify"].start_time, spans["verify"].end_time) == (1_500, 1_500)
    assert spans["burst"].parent == request.get_span_context()
    assert spans["verify"].parent is not None
    assert spans["verify"].parent.span_id == spans["burst"].get_span_context().span_id  # type: ignore[union-attr]
    assert len(spans["verify"].links) == 1


def test_registries_are_apart() -> None:
    one, other = telemetry.build("a", None), telemetry.build("b", None)
    Counter("burstline_things", "Things.", registry=one.registry).inc()
    Counter("burstline_things", "Things.", registry=other.registry)
    assert b"burstline_things_total 1.0" in generate_latest(one.registry)
    assert b"process_" in generate_latest(one.registry)


async def test_tasks_are_counted_where_there_is_a_loop() -> None:
    registry = telemetry.build("a", None).registry
    before = registry.get_sample_value(telemetry.TASKS)
    assert before is not None
    more = [asyncio.create_task(asyncio.Event().wait()) for _ in range(3)]
    assert registry.get_sample_value(telemetry.TASKS) == before + 3
    for task in more:
        task.cancel()
    await asyncio.gather(*more, return_exceptions=True)
    assert registry.get_sample_value(telemetry.TASKS) == before
    assert telemetry.TASKS.encode() not in await asyncio.to_thread(generate_latest, registry)


def test_set_up_writes_to_the_local_store_and_shuts_down_twice(tmp_path: Path) -> None:
    tool: Telemetry = telemetry.setup("gateway", CommonSettings(data_dir=tmp_path), logging=False)
    with tool.span("POST /v1", attributes={"model": "pocket"}) as span:
        wanted = telemetry.trace_id(span)
    tool.shutdown()
    tool.shutdown()
    (stored,) = TraceStore(tmp_path / telemetry.TRACES_FILE).read(wanted)
    assert (stored.service, stored.name, stored.attributes) == ("gateway", "POST /v1", {"model": "pocket"})


def test_a_store_that_cannot_be_written_costs_spans_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "traces.db").mkdir()
    tool = telemetry.setup("gateway", CommonSettings(data_dir=tmp_path), logging=False)
    for _ in range(3):
        with tool.span("x"):
            pass
        tool.provider.force_flush()
    tool.shutdown()
    assert [record.name for record in caplog.records].count("shared.tracestore") == 1
