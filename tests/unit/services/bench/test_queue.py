"""The instant engine tells when it made a burst, and the figures and bars that are made of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.bench.queue import _burst_ms, bars
from services.bench.queue_client import Connection, Timed
from services.bench.queue_engine import DIGITS, InstantEngine, digits_of, dims, stamp_us
from services.bench.queue_peer import _answer, body
from services.gpu_worker.engine.events import Burst, Finished, FinishReason
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from shared.errors import Unavailable

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


def _results(first: float, peer: float | None) -> dict[str, Any]:
    figures = {"p50": first, "p99": first}
    theirs = {"not_measured": "why"} if peer is None else {"first_token_ms": {"p50": peer, "p99": peer}}
    return {"bare_request_reply_ms": {"p50": 1.0}, "first_token_ms": figures, "litellm": theirs}


def test_bars_hold_and_break_and_without_litellm_none_is_told_of_it() -> None:
    assert [bar.holds for bar in bars(_results(3.9, 5.0))] == [True, True, True]
    assert [bar.holds for bar in bars(_results(4.1, 4.0))] == [False, False, False]
    assert len(bars(_results(1.0, None))) == 1


async def test_the_caller_reads_the_instant_servers_stream_and_tells_a_stream_without_text() -> None:
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _answer(reader, writer)
        await writer.wait_closed()
        over.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Connection(f"http://127.0.0.1:{port}", "none") as connection:
        for words in (1, 3):
            timed = await connection.stream(body(words))
            assert len(timed.events) == words + 1
            assert timed.first_text_ms() > 0
    server.close()
    await asyncio.wait_for(over.wait(), 10)  # no connection outlives the loop
    with pytest.raises(Unavailable):
        Timed(sent_ns=0, events=()).first_text_ms()
