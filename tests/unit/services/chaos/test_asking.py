"""A caller's way through connections that break, refusals and ends."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from services.chaos import asking
from services.chaos.asking import Asked, Caller, End, Way
from services.chaos.cases import Case, cases

CASE = Case(name="greedy-0", prompt=(300,), max_tokens=4, temperature=0.0, seed=0)
NAMED = {"x-burstline-request-id": "a" * 32}
Handler = Callable[[httpx.Request], httpx.Response]


class Breaks(httpx.AsyncByteStream):
    """A body that ends by a broken connection."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data
        raise httpx.ReadError("gone")


def _event(name: str, *tokens: int) -> bytes:
    told = json.dumps({"choices": [{"index": 0, "token_ids": tokens}]})
    return f"id: {name}\ndata: {told}\n\n".encode()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "RETRY_S", 0.0)


async def _ask(handler: Handler, way: Way, *, patience: int = 50) -> Asked:
    ticks = iter(range(0, 10_000, max(1, int(asking.PATIENCE_S) // patience)))
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as http:
        caller = Caller(http, ["http://one", "http://two"], random.Random(1), lambda: float(next(ticks)))
        return await caller.ask(CASE, way)


async def test_fr_65_a_stream_with_a_key_goes_on_at_the_other_gateway_from_its_last_event() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if len(seen) == 1:
            return httpx.Response(200, headers=NAMED, stream=Breaks(_event("0.2.0", 5, 6)))
        return httpx.Response(200, headers=NAMED, content=_event("0.4.0", 7, 8) + b"data: [DONE]\n\n")

    asked = await _ask(answer, Way.KEYED_STREAM)
    assert (asked.end, asked.tokens, asked.returns) == (End.WHOLE, [5, 6, 7, 8], 1)
    assert seen[0].url.host != seen[1].url.host
    assert seen[0].headers["idempotency-key"] == seen[1].headers["idempotency-key"]
    assert "last-event-id" not in seen[0].headers
    assert seen[1].headers["last-event-id"] == "0.2.0"


@pytest.mark.parametrize(("way", "end"), [(Way.KEYED_STREAM, End.WHOLE), (Way.STREAM, End.FAILED)])
async def test_a_gateway_that_ends_sends_who_has_a_key_to_the_other(way: Way, end: End) -> None:
    told = b'data: {"error": {"code": "shutting_down"}}\n\ndata: [DONE]\n\n'

    def answer(request: httpx.Request) -> httpx.Response:
        if "last-event-id" not in request.headers:
            return httpx.Response(200, headers=NAMED, content=_event("0.2.0", 5, 6) + told)
        return httpx.Response(200, headers=NAMED, content=_event("0.4.0", 7, 8) + b"data: [DONE]\n\n")

    assert (await _ask(answer, way)).end is end


async def test_who_leaves_without_a_word_is_gone_when_its_patience_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking, "LEAVES_AFTER_S", (0.01,))

    class Silent(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

    asked = await _ask(lambda _: httpx.Response(200, headers=NAMED, stream=Silent()), Way.LEAVES_WHOLE)
    assert asked.end is End.LEFT


async def test_a_stream_without_a_key_is_never_asked_twice_once_it_was_taken() -> None:
    asked = await _ask(
        lambda request: httpx.Response(200, headers=NAMED, stream=Breaks(_event("0.1.0", 5))), Way.STREAM
    )
    assert (asked.end, asked.tokens, asked.returns) == (End.BROKEN, [5], 0)
    assert asked.request_ids == ["a" * 32]


async def test_a_gateway_that_cannot_be_reached_is_passed_over() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "one":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, headers=NAMED, json={"choices": [{"token_ids": [5, 6, 7, 8]}]})

    for _ in range(3):
        assert (await _ask(answer, Way.WHOLE)).end is End.WHOLE


@pytest.mark.parametrize(
    ("headers", "code", "untyped"),
    [({"retry-after": "1"}, "overloaded", 0), ({}, "overloaded", 1), ({"retry-after": "1"}, "", 1)],
)
async def test_a_refusal_must_say_its_code_and_when_to_come_back(
    headers: dict[str, str], code: str, untyped: int
) -> None:
    body = {"error": {"code": code}} if code else {}
    asked = await _ask(lambda _: httpx.Response(503, headers=headers, json=body), Way.STREAM)
    assert (asked.end, asked.refusals, asked.untyped) == (End.REFUSED, 1, untyped)


async def test_an_error_in_the_stream_is_a_failure_and_patience_has_an_end() -> None:
    told = b'data: {"error": {"code": "workers_gone"}}\n\n'
    asked = await _ask(lambda _: httpx.Response(200, headers=NAMED, content=told), Way.STREAM)
    assert (asked.end, asked.code) == (End.FAILED, "workers_gone")

    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert (await _ask(away, Way.STREAM, patience=3)).end is End.GAVE_UP


async def test_who_leaves_has_a_beginning() -> None:
    content = b"".join(_event(f"0.{place}.0", place) for place in range(20)) + b"data: [DONE]\n\n"
    asked = await _ask(lambda _: httpx.Response(200, headers=NAMED, content=content), Way.LEAVES)
    assert asked.end is End.LEFT
    assert asked.tokens == list(range(len(asked.tokens)))


def test_cases_are_a_function_of_the_seed_and_half_are_sampled() -> None:
    assert cases(3) == cases(3) != cases(4)
    assert sum(case.temperature > 0 for case in cases(3)) * 2 == len(cases(3))
