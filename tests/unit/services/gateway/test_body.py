"""Bodies: limits hold while reading, whatever the headers promise."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from services.gateway.body import BodyTimeout, parse_object, read_json_object
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
    return await read_json_object(request, max_bytes=100, max_depth=8, timeout_s=0.1)


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
            assert parse_object(data, max_depth=64) == value
        except InvalidRequest:
            assert "\\ud" in text.lower()


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60) | st.text('{}[]":,\\0ae-. ', max_size=40).map(str.encode))
def test_any_bytes_are_an_object_or_a_400(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):  # any other error fails the test
        assert isinstance(parse_object(data, max_depth=8), dict)


@pytest.mark.parametrize(("depth", "good"), [(64, True), (65, False)])
def test_fr_59_nesting_is_counted_outside_strings(depth: int, good: bool) -> None:
    data = b'{"a": "[[[[{{{{", "b": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    if good:
        parse_object(data, max_depth=64)
    else:
        with pytest.raises(InvalidRequest, match="64 levels"):
            parse_object(data, max_depth=64)
