"""The instant engine tells when it made a burst, and the figures and bars that are made of it."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.bench.queue import _burst_ms, _machine, _told, bars
from services.bench.queue_client import Connection, Timed, _events
from services.bench.queue_direct import body, direct, events
from services.bench.queue_engine import DIGITS, InstantEngine, digits_of, dims, stamp_us
from services.bench.queue_way import way
from services.gpu_worker.engine.events import Burst, Finished, FinishReason
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from shared.errors import Unavailable
from shared.tracestore import StoredSpan, TraceStore

ALPHABET = tuple(range(100, 116))
REQUEST = GenerateRequest(
    request_id="r", root=b"", tokens=(1, 2), chain=(), sampling=SamplingParams(seed=1), max_tokens=25
)


@settings(deadline=None, max_examples=50)
@given(now=st.integers(0, 1 << (4 * DIGITS) - 1))
def test_a_burst_tells_its_time(now: int) -> None:
    assert stamp_us(digits_of(now)) == now


def _run(engine: InstantEngine) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Burst):
                assert event.offset == len(tokens)
                tokens += event.tokens
            if isinstance(event, Finished):
                return tokens, event
    raise AssertionError("no end")


def test_the_instant_engine_keeps_the_budget() -> None:
    engine = InstantEngine(ALPHABET, dims(200))
    engine.submit(REQUEST)
    tokens, end = _run(engine)
    assert len(tokens) == end.completion_tokens == 25
    assert end.reason is FinishReason.LENGTH
    assert set(tokens) <= set(ALPHABET)
    assert not engine.has_work()


def test_the_instant_engine_goes_on_after_what_was_emitted_and_ends_when_cancelled() -> None:
    engine = InstantEngine(ALPHABET, dims(200))
    engine.submit(replace(REQUEST, emitted=(100,) * 20))
    first = engine.step()
    assert [event.offset for event in first if isinstance(event, Burst)] == [20]
    engine.submit(replace(REQUEST, request_id="other"))
    engine.cancel("other", "client_disconnected")
    assert _run(engine)[1].reason is FinishReason.CANCELLED


def test_a_burst_is_timed_from_its_making_to_the_event_that_completes_it() -> None:
    made_us = 5_000_000
    tokens = [ALPHABET[digit] for digit in digits_of(made_us)]
    events = tuple(
        ((made_us + late_us) * 1000, {"choices": [{"token_ids": part}]})
        for late_us, part in ((500, tokens[:4]), (2000, tokens[4:]))
    )
    digits = {token: place for place, token in enumerate(ALPHABET)}
    assert _burst_ms(Timed(sent_ns=0, events=events), digits) == [2.0]


def _results(added: float, peer: float | None) -> dict[str, Any]:
    theirs = {"not_measured": "why"} if peer is None else _told([peer + 1.0], [1.0], 1.0)
    return {"bare_request_reply_ms": {"p50": 1.0}, "litellm": theirs} | _told([added + 1.0], [1.0], 1.0)


def test_bars_hold_and_break_and_without_litellm_none_is_told_of_it() -> None:
    assert [bar.holds for bar in bars(_results(3.9, 5.0))] == [True] * 5
    assert [bar.holds for bar in bars(_results(4.1, 4.0))] == [False] * 5
    assert len(bars(_results(1.0, None))) == 1


def test_what_is_added_stands_beside_the_whole_and_a_rounds_difference_is_its_own() -> None:
    told = _told([5.0, 9.0, 6.0], [1.0, 2.0, 3.0], 0.5)
    assert told["first_token_ms"]["p50"] == 6.0
    assert told["added_ms"]["p50"] == 4.0
    assert told["paired_added_ms"]["p50"] == 4.0
    assert told["paired_added_ms"]["max"] == 7.0
    assert told["over_bare_p50"] == {"whole": 12.0, "added": 8.0}


async def test_the_caller_reads_the_direct_servers_stream(tmp_path: Path) -> None:
    async with direct(tmp_path) as url, Connection(url, "none") as connection:
        for tokens, bursts in ((1, 1), (DIGITS + 1, 2)):
            timed = await connection.stream(body(tokens))
            assert len(timed.events) == bursts + 1
            assert timed.first_text_ms() > 0


async def test_the_direct_server_tells_every_token_once() -> None:
    rows = [row async for row in events(2 * DIGITS + 3)]
    texts = [json.loads(row[6:])["choices"][0]["delta"].get("content", "") for row in rows[:-1]]
    assert [len(text) for text in texts] == [DIGITS, DIGITS, 3, 0]


def test_a_stream_without_text_is_told() -> None:
    with pytest.raises(Unavailable):
        Timed(sent_ns=0, events=()).first_text_ms()


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = [
    b": hello\n\n",
    b'data: {"a": 1}\n',
    b'\ndata: {"b": 2}\n\ndata: {"c"',
    b": 3}\n\n",
    b"data: [DONE]\n\n",
]
ANSWER = HEAD + b"".join(f"{len(one):x}\r\n".encode() + one + b"\r\n" for one in CHUNKS) + b"0\r\n\r\n"


@settings(deadline=None, max_examples=60)
@given(cuts=st.lists(st.integers(1, len(ANSWER) - 1), unique=True, max_size=12))
def test_an_answer_reads_the_same_however_it_is_cut_and_events_have_the_time_of_their_last_piece(
    cuts: list[int],
) -> None:
    edges = [0, *sorted(cuts), len(ANSWER)]
    pieces = [(end, ANSWER[begin:end]) for begin, end in itertools.pairwise(edges)]
    found = list(_events(pieces))
    assert [told for _, told in found] == [{"a": 1}, {"b": 2}, {"c": 3}]
    for at, told in found:
        digit = json.dumps(told).encode()[-2:-1]
        inside = ANSWER.index(digit + b"}\n")  # before the event's own end, which a later chunk may bring
        assert at in edges
        assert at > inside


def test_an_answer_that_is_none_is_told() -> None:
    with pytest.raises(Unavailable, match="503"):
        list(_events([(1, b"HTTP/1.1 503 Service Unavailable\r\n\r\n")]))
    with pytest.raises(Unavailable, match="closed"):
        list(_events([]))


async def test_the_way_is_told_by_the_spans_of_each_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, trace = TraceStore(tmp_path / "traces.db"), "a" * 32
    names = {"POST /v1/chat/completions": 1, "enqueue": 3, "worker.request": 6, "engine.burst": 9}
    # The clock of the spans is the wall's, that of the caller the monotonic one: 100 ms between them here.
    monkeypatch.setattr("services.bench.queue_way.SYSTEM.wall_ns", lambda: 100_000_000, raising=False)
    monkeypatch.setattr("services.bench.queue_way.SYSTEM.monotonic_ns", lambda: 0, raising=False)
    store.write(
        StoredSpan(
            trace_id=trace, span_id=f"{place:016x}", parent_id="", service="x", name=name,
            start_ns=(100 + at) * 1_000_000, end_ns=(101 + at) * 1_000_000,
        )
        for place, (name, at) in enumerate(names.items())
    )  # fmt: skip
    events = (
        (15_000_000, {"choices": [{"delta": {"content": "a"}}]}),
        (20_000_000, {"burstline": {"trace_id": trace}}),
    )
    found = await way(store, [Timed(sent_ns=0, events=events)])
    assert {name: figures["p50"] for name, figures in found.items()} == {
        "to_the_gateway": 1.0, "gateway": 2.0, "queue": 3.0, "worker": 4.0, "back": 5.0,
    }  # fmt: skip


def test_the_machine_is_told_with_the_class_that_the_process_runs_in() -> None:
    told = _machine()
    assert getattr(os, told["scheduling"]) == os.sched_getscheduler(0)
    assert told["cores"] == len(os.sched_getaffinity(0))
