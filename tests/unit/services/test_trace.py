"""`burstline trace`: the tree, the bars, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services import trace
from shared.clock import SYSTEM
from shared.telemetry import TRACES_FILE
from shared.tracestore import StoredSpan, TraceStore

NOW = SYSTEM.wall_ns()


def span(identity: str, parent: str, start_ms: int, end_ms: int, **changes: object) -> StoredSpan:
    values: dict[str, object] = {
        "trace_id": "abcd" * 8,
        "span_id": identity,
        "parent_id": parent,
        "service": "gateway",
        "name": f"span {identity}",
        "start_ns": NOW + start_ms * 1_000_000,
        "end_ns": NOW + end_ms * 1_000_000,
    }
    return StoredSpan(**{**values, **changes})  # type: ignore[arg-type]


SPANS = [
    span("c", "b", 20, 30, service="worker", attributes={"drafted": 9, "accepted": 7}),
    span("a", "", 0, 100, attributes={"burstline.request_id": "r"}),
    span("d", "a", 90, 100, error="unavailable"),
    span("b", "a", 10, 40),
    span("lost", "gone", 50, 60),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TraceStore(tmp_path / TRACES_FILE).write(SPANS)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(trace.app, arguments, env={"COLUMNS": "160"})
    return result.exit_code, result.output


def test_the_tree_is_depth_first_by_start_and_orphans_are_roots() -> None:
    assert [(depth, one.span_id) for depth, one in trace.tree(SPANS)] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (1, "d"),
        (0, "lost"),
    ]


def test_a_span_that_names_itself_or_a_doubled_trace_is_no_endless_tree() -> None:
    assert len(list(trace.tree([span("a", "a", 0, 1), span("b", "a", 0, 1)]))) == 2


def test_bars_lie_where_the_span_lies_and_are_never_empty() -> None:
    begin, end = NOW, NOW + 100_000_000
    assert trace.bar(SPANS[1], begin, end, 10) == "█" * 10
    assert trace.bar(SPANS[0], begin, end, 10) == "  █"
    assert trace.bar(SPANS[2], begin, end, 10) == " " * 9 + "█"
    assert trace.bar(span("z", "", 100, 100), begin, end, 10) == " " * 9 + "█"
    assert trace.bar(span("z", "", 0, 0), NOW, NOW, 10) == "█"


@pytest.mark.parametrize(
    ("nanoseconds", "text"), [(1_500, "2 µs"), (2_340_000, "2.3 ms"), (1_234_000_000, "1.23 s")]
)
def test_durations(nanoseconds: int, text: str) -> None:
    assert trace.duration(nanoseconds) == text


def test_the_waterfall_shows_names_services_times_and_attributes() -> None:
    console = Console(width=160, record=True)
    console.print(trace.render_waterfall(SPANS))
    text = console.export_text()
    assert "5 spans · 100.0 ms" in text
    assert "    span c" in text
    assert "drafted=9 accepted=7" in text
    assert "error: unavailable" in text


@pytest.mark.parametrize("wanted", ["last", "abcd", "ABCDab", "abcd" * 8])
def test_a_trace_is_found_by_id_prefix_or_last(folder: Path, wanted: str) -> None:
    status, output = run(wanted, "--data-dir", str(folder))
    assert status == 0
    assert "abcd" * 8 in output


def test_last_is_the_last_generation_and_what_came_after_it_is_told_by_id(folder: Path) -> None:
    TraceStore(folder / TRACES_FILE).write(
        [span("n", "", 500, 501, trace_id="eeff" * 8, name="GET /v1/nothing")]
    )
    status, output = run("last", "--data-dir", str(folder))
    assert status == 0
    assert "span a" in output
    assert "GET /v1/nothing" not in output
    assert "burstline trace eeffeeffeeff" in output
    status, output = run("eeffeeffeeff", "--data-dir", str(folder))
    assert (status, "GET /v1/nothing" in output) == (0, True)


def test_without_any_generation_last_is_the_last_request_and_says_so(tmp_path: Path) -> None:
    TraceStore(tmp_path / TRACES_FILE).write([span("n", "", 0, 1, name="GET /v1/nothing")])
    status, output = run("last", "--data-dir", str(tmp_path))
    assert status == 0
    assert "GET /v1/nothing" in output
    assert "none of these requests became a generation" in output


def test_a_part_of_a_trace_says_of_how_many(folder: Path) -> None:
    for shown, of, words in (
        (5, 0, "5 spans"),
        (5, 5, "5 spans"),
        (3, 5, "3 of 5 spans"),
        (1, 0, "1 span ·"),
    ):
        title = trace.render_waterfall(SPANS[:shown], of=of).title
        assert f"· {words}" in str(title)


def test_json_is_the_evidence_object(folder: Path, tmp_path: Path) -> None:
    status, output = run("last", "--json", "-", "--data-dir", str(folder))
    assert status == 0
    told = json.loads(output)
    assert (told["command"], told["results"]["spans"], told["bars"]) == ("trace", 5, [])
    assert {one["span_id"] for one in told["spans"]} == {"a", "b", "c", "d", "lost"}
    file = tmp_path / "out.json"
    status, output = run("last", "--json", str(file), "--data-dir", str(folder))
    assert status == 0
    assert "span a" in output
    assert json.loads(file.read_text())["results"] == told["results"]


def test_an_unknown_id_an_ambiguous_one_and_an_empty_store_are_said(folder: Path, tmp_path: Path) -> None:
    TraceStore(folder / TRACES_FILE).write([span("z", "", 0, 1, trace_id="abef" * 8)])
    for wanted, place, words in (
        ("ffff", folder, "begins with 'ffff'"),
        ("ab", folder, "several traces"),
        ("last", tmp_path / "nothing", "no traces"),
    ):
        status, output = run(wanted, "--data-dir", str(place))
        assert status == 1
        assert words in output
        if place != folder or wanted == "ffff":
            assert "--data-dir" in output, "where else there may be some"
