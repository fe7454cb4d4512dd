"""The local trace store: bounded, shared by processes, readable by prefix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.clock import ManualClock
from shared.tracestore import StoredSpan, TraceStore

DAY_S = 24 * 3600


def span(trace: str, name: str = "s", *, at_ns: int, parent: str = "", identity: str = "") -> StoredSpan:
    return StoredSpan(
        trace_id=trace,
        span_id=identity or f"{name}-{at_ns}",
        parent_id=parent,
        service="test",
        name=name,
        start_ns=at_ns,
        end_ns=at_ns + 10,
        attributes={"n": 1, "ok": True},
        links=("l",),
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def store(tmp_path: Path, clock: ManualClock, **limits: int) -> TraceStore:
    return TraceStore(tmp_path / "deep" / "traces.db", clock=clock, **limits)


def test_a_trace_is_read_back_in_the_order_of_its_starts(tmp_path: Path, clock: ManualClock) -> None:
    held = store(tmp_path, clock)
    now = clock.wall_ns()
    spans = [span("a" * 32, at_ns=now + offset) for offset in (5, 1, 3)]
    held.write(spans)
    held.write(spans)  # an exporter that tries again
    assert held.read("a" * 32) == sorted(spans, key=lambda one: one.start_ns)
    assert held.read("b" * 32) == []


def test_an_absent_store_is_empty_and_is_not_made_by_reading(tmp_path: Path, clock: ManualClock) -> None:
    held = store(tmp_path, clock)
    assert held.read("a") == []
    assert held.find("a") == []
    assert held.latest() is None
    assert not (tmp_path / "deep").exists()


def test_find_and_latest(tmp_path: Path, clock: ManualClock) -> None:
    held = store(tmp_path, clock)
    now = clock.wall_ns()
    held.write([span("ab1", at_ns=now), span("ab2", at_ns=now + 1), span("cd1", at_ns=now + 2, parent="p")])
    assert held.find("ab") == ["ab2", "ab1"]
    assert held.find("AB1") == ["ab1"]
    assert held.find("%") == held.find("_") == held.find("")
    assert held.find("zz") == []
    assert held.latest() == "ab2"


def test_too_old_spans_are_dropped(tmp_path: Path, clock: ManualClock) -> None:
    store(tmp_path, clock).write([span("old", at_ns=clock.wall_ns())])
    clock.advance(8 * DAY_S)
    held = store(tmp_path, clock)
    held.write([span("new", at_ns=clock.wall_ns())])
    assert held.read("old") == []
    assert len(held.read("new")) == 1


def test_the_oldest_above_the_count_are_dropped(tmp_path: Path, clock: ManualClock) -> None:
    now = clock.wall_ns()
    for index in range(10):  # a new handle prunes at its first write
        store(tmp_path, clock, max_spans=4).write(
            [span(f"t{index}", at_ns=now + index * 10 + part) for part in range(2)]
        )
    held = store(tmp_path, clock)
    assert [len(held.read(f"t{index}")) for index in range(10)] == [0] * 8 + [2, 2]


def test_a_long_lived_writer_prunes_too(tmp_path: Path, clock: ManualClock) -> None:
    held = store(tmp_path, clock, max_spans=10)
    now = clock.wall_ns()
    for index in range(200):
        held.write([span(f"t{index}", at_ns=now + index)])
    kept = sum(len(held.read(f"t{index}")) for index in range(200))
    assert 10 <= kept <= 10 + 64


def test_several_processes_write_at_once(tmp_path: Path, clock: ManualClock) -> None:
    program = (
        "import sys, pathlib\n"
        "from shared.tracestore import StoredSpan, TraceStore\n"
        "store = TraceStore(pathlib.Path(sys.argv[1]))\n"
        "from shared.clock import SYSTEM\n"
        "for i in range(20):\n"
        "    store.write([StoredSpan(trace_id='t', span_id=f'{sys.argv[2]}-{i}', parent_id='', service='s',\n"
        "        name='n', start_ns=SYSTEM.wall_ns(), end_ns=SYSTEM.wall_ns())])\n"
    )
    path = tmp_path / "traces.db"
    root = Path(__file__).parents[3]
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(path), str(number)], cwd=root)
        for number in range(4)
    ]
    assert [one.wait(120) for one in running] == [0] * 4
    assert len(TraceStore(path).read("t")) == 80
