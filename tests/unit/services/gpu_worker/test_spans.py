"""What a burst and an ended stream come to in traces and metrics, where a journal was replayed."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from services.gpu_worker import spans
from services.gpu_worker.engine.events import Burst, SpecTelemetry
from services.gpu_worker.metrics import DraftMetrics
from services.trace import ATTRIBUTES_SHOWN
from shared.telemetry import build

NAME = "burstline.replayed"


def burst(replayed: int) -> Burst:
    counts = {"rounds": 2, "drafted": 0, "accepted": 0, "replayed": replayed}
    return Burst(
        request_id="r", choice=0, offset=9, tokens=(5, 6), logprobs=None, start_ns=1, end_ns=2, **counts
    )


@pytest.mark.parametrize("replayed", [0, 141])
def test_a_burst_tells_what_was_replayed_where_a_waterfall_shows_it(replayed: int) -> None:
    told = InMemorySpanExporter()
    telemetry = build("worker", None)
    telemetry.provider.add_span_processor(SimpleSpanProcessor(told))
    spans.record(telemetry, None, burst(replayed))
    (span,) = told.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes.get(NAME) == (replayed or None)
    assert span.attributes["burstline.accepted"] == 0
    assert (NAME in list(span.attributes)[:ATTRIBUTES_SHOWN]) is (replayed > 0)


def test_replayed_tokens_have_a_metric_of_their_own() -> None:
    registry = CollectorRegistry()
    metrics = DraftMetrics(registry)
    metrics.verified(burst(141))
    metrics.spent(SpecTelemetry(rounds=2, replayed=141))
    names = ("rounds", "drafted_tokens", "accepted_tokens", "replayed_tokens")
    values = [registry.get_sample_value(f"burstline_worker_{name}_total") for name in names]
    assert values == [2, 0, 0, 141]
