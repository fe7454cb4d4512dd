"""Spans over OTLP/HTTP: what a receiver reads is what was told, and one that is away costs nothing but spans."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.embedded.ports import free_port
from shared import telemetry
from shared.clock import SYSTEM
from shared.config import CommonSettings, load
from shared.telemetry import TRACES_FILE
from tests.otlp import receiving


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


@pytest.mark.parametrize("hangs", [False, True], ids=["away", "hung"])
def test_a_receiver_that_is_away_or_hangs_holds_up_neither_spans_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, hangs: bool
) -> None:
    """One that hangs takes the connection and says nothing, as a collector does whose disk is full."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tool = told(
            monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1] if hangs else free_port()}", tmp_path
        )
        for _ in range(2):
            with tool.span("alone"):
                pass
        if hangs:
            silent.settimeout(10)
            asked, _ = silent.accept()  # an export is on its way already, and another will follow
            with asked, tool.span("late"):
                pass
        began = SYSTEM.monotonic_ns()
        tool.shutdown()
        took_s = (SYSTEM.monotonic_ns() - began) / 1e9
    assert took_s < telemetry.LAST_EXPORT_S + 1.0, "a shutdown waits for a receiver that does not answer"
    assert ("the last export took more than" in caplog.text) == (took_s >= telemetry.LAST_EXPORT_S)
    if hangs:
        assert took_s >= telemetry.LAST_EXPORT_S, "it was not waited for"
