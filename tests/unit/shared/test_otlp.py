"""Spans over OTLP/HTTP: what a receiver reads is what was told, and one that is away costs nothing but spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.embedded.ports import free_port
from shared import telemetry
from shared.config import CommonSettings, load
from shared.telemetry import TRACES_FILE


class Receiver(ThreadingHTTPServer):
    """Takes traces as a collector does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        self.server.paths.append(self.path)
        self.server.requests.append(ExportTraceServiceRequest.FromString(data))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: standard error is for faults."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def told(monkeypatch: pytest.MonkeyPatch, endpoint: str, folder: Path) -> telemetry.Telemetry:
    monkeypatch.setenv("BURSTLINE_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("BURSTLINE_DATA_DIR", str(folder))
    return telemetry.setup("gateway", load(CommonSettings), logging=False)


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_receiver_reads_names_parents_times_and_attributes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slash: str
) -> None:
    with receiving() as server:
        tool = told(monkeypatch, server.url + slash, tmp_path)
        with tool.span("outer") as outer:
            outer.set_attribute("burstline.cached_tokens", 64)
            with tool.span("inner", outer):
                pass
        tool.shutdown()
        paths, requests = server.paths, server.requests
    assert set(paths) == {"/v1/traces"}
    groups = [group for request in requests for group in request.resource_spans]
    named = {pair.key: pair.value.string_value for pair in groups[0].resource.attributes}
    assert named["service.name"] == "gateway"
    spans = {span.name: span for group in groups for scope in group.scope_spans for span in scope.spans}
    assert set(spans) == {"outer", "inner"}
    assert spans["inner"].parent_span_id == spans["outer"].span_id
    assert spans["inner"].trace_id == spans["outer"].trace_id
    assert spans["outer"].end_time_unix_nano >= spans["inner"].end_time_unix_nano > 0
    assert [(pair.key, pair.value.int_value) for pair in spans["outer"].attributes] == [
        ("burstline.cached_tokens", 64)
    ]
    assert not (tmp_path / TRACES_FILE).exists(), "spans go to one place"


def test_a_receiver_that_is_away_holds_up_neither_spans_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tool = told(monkeypatch, f"http://127.0.0.1:{free_port()}", tmp_path)
    ended = threading.Event()
    with tool.span("alone"):
        pass
    stop = threading.Thread(target=lambda: (tool.shutdown(), ended.set()))
    stop.start()
    assert ended.wait(15), "a shutdown waits for a receiver that is not there"
    stop.join()
