"""Bodies: limits hold while reading, whatever the headers promise."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.requests import Request

from services.gateway import faults
from services.gateway.body import BodyLimits, BodyTimeout, parse_object, read_json_object
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.completions import CompletionRequest
from shared.clock import SYSTEM
from shared.errors import InvalidRequest, PayloadTooLarge
from tests.unit.services.gateway.line import HEADERS, Line

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)

LIMITS = BodyLimits(size=100, depth=8, containers=20, keys=10, time_s=0.1)
DEEP = BodyLimits(size=4 << 20, depth=64, containers=100, keys=100, time_s=0.1)


def chunked(*chunks: bytes, hang: bool = False) -> Request:
    """A request whose body comes in chunks, without a length."""
    waiting = list(chunks)

    async def receive() -> dict[str, Any]:
        if not waiting and hang:
            await asyncio.Event().wait()
        chunk = waiting.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(waiting) or hang}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


async def read(request: Request) -> dict[str, object]:
    return await read_json_object(request.receive, dict(request.headers), LIMITS)


async def test_fr_60_the_read_stops_at_the_limit() -> None:
    with pytest.raises(PayloadTooLarge, match="100 bytes"):
        await read(chunked(b"x" * 60, b"x" * 60, b"never read"))


async def test_fr_60_a_slow_drip_is_given_up() -> None:
    with pytest.raises(BodyTimeout):
        await read(chunked(b"{", hang=True))


async def test_chunks_are_joined() -> None:
    assert await read(chunked(b'{"a"', b": ", b"1}")) == {"a": 1}


async def test_fr_60_a_stated_length_over_the_limit_is_refused_unread(line: Line) -> None:
    response = await line.client.post(
        "/v1/completions",
        content=b"{}",
        headers={**HEADERS, "content-type": "application/json", "content-length": "99999999"},
    )
    assert response.status_code == 413
    assert str(line.gateway.settings.max_body_bytes) in response.json()["error"]["message"]


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_good_json_is_read_as_python_reads_it(value: dict[str, Any]) -> None:
    import json

    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only)
        try:
            data = text.encode()
        except UnicodeEncodeError:
            continue
        try:
            assert parse_object(data, DEEP) == value
        except InvalidRequest:
            assert "\\ud" in text.lower()


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60) | st.text('{}[]":,\\0ae-. ', max_size=40).map(str.encode))
def test_any_bytes_are_an_object_or_a_400(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):  # any other error fails the test
        assert isinstance(parse_object(data, LIMITS), dict)


@pytest.mark.parametrize(("depth", "good"), [(64, True), (65, False)])
def test_fr_59_nesting_is_counted_outside_strings(depth: int, good: bool) -> None:
    data = b'{"a": "[[[[{{{{", "b": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    if good:
        parse_object(data, DEEP)
    else:
        with pytest.raises(InvalidRequest, match="64 levels"):
            parse_object(data, DEEP)


def test_fr_59_objects_and_arrays_are_counted_in_all() -> None:
    parse_object(b'{"a": [' + b"{}," * 17 + b"{}]}", LIMITS)
    with pytest.raises(InvalidRequest, match="more than 20 objects and arrays"):
        parse_object(b'{"a": [' + b"{}," * 18 + b"{}]}", LIMITS)


def test_fr_59_keys_of_one_object_are_counted() -> None:
    keys = ",".join(f'"{number}": 1' for number in range(11))
    with pytest.raises(InvalidRequest, match="more than 10 keys"):
        parse_object(f'{{"a": {{{keys}}}}}'.encode(), LIMITS)


HOSTILE = {
    "quotes in a string without an end": b'{"a": "' + b'\\"' * 2_000_000,
    "the same, ended by a backslash": b'{"a": "' + b'\\"' * 2_000_000 + b"\\",
    "backslashes": b'{"a": "' + b"\\" * 4_000_000,
    "a number of many digits": b'{"a": 0.' + b"0" * 4_000_000 + b"1}",
    "openings": b'{"a": ' + b"[{" * 2_000_000,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_fr_60_the_worst_body_of_full_size_costs_seconds_at_most(data: bytes) -> None:
    """Linear in its size: quadratic work on four million bytes would take days."""
    began = SYSTEM.monotonic_ns()
    with contextlib.suppress(InvalidRequest):
        parse_object(data, DEEP)
    assert SYSTEM.monotonic_ns() - began < 20_000_000_000


FAULTY: dict[str, tuple[type[BaseModel], dict[str, object]]] = {
    "prompt": (CompletionRequest, {"prompt": [-1] * 500_000}),
    "prompts": (CompletionRequest, {"prompt": [[-1]] * 500_000}),
    "messages": (ChatRequest, {"messages": [{"role": "robot"}] * 500_000}),
    "stop": (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "stop": [1] * 500_000}),
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": [1] * 500_000}]}),
}


@pytest.mark.parametrize(("schema", "body"), FAULTY.values(), ids=FAULTY.keys())
def test_fr_60_a_list_of_faults_costs_no_more_than_its_first(
    schema: type[BaseModel], body: dict[str, object]
) -> None:
    began = SYSTEM.monotonic_ns()
    with pytest.raises(InvalidRequest):
        faults.validate(schema, {"model": "pocket", **body})
    assert SYSTEM.monotonic_ns() - began < 1_000_000_000  # collecting every fault takes ten times this
