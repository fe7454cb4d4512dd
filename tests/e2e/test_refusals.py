"""Bad requests get their 4xx through the real line, and the next good one works."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.conftest import Line

GOOD = {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
JSON = {"Content-Type": "application/json"}


def send(line: Line, content: str | bytes, key: str | None = None) -> httpx.Response:
    with line.client(key) as client:
        return client.post("/v1/chat/completions", content=content, headers=JSON)


def ask(line: Line, **changes: object) -> httpx.Response:
    with line.client() as client:
        return client.post("/v1/chat/completions", json=GOOD | changes)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"messages": []}, 400),
        ({"messages": "hello"}, 400),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400),
        ({"max_tokens": 0}, 400),
        ({"temperature": "hot"}, 400),
        ({"no_such_field": 1}, 400),
        ({"model": "no-such-model"}, 404),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, 400),
    ],
    ids=["empty", "type", "role", "max_tokens", "temperature", "unknown", "model", "too-long"],
)
def test_a_bad_field_is_refused_before_the_queue(line: Line, changes: dict[str, object], status: int) -> None:
    refused = ask(line, **changes)
    assert refused.status_code == status, refused.text
    assert set(refused.json()["error"]) >= {"message", "type", "param", "code"}
    assert ask(line).status_code == 200


@pytest.mark.parametrize(
    ("content", "status"),
    [("{", 400), ("[]", 400), (b"\xff", 400), ("x" * (5 << 20), 413)],
    ids=["cut", "array", "utf8", "huge"],
)
def test_a_bad_body_is_refused(line: Line, content: str | bytes, status: int) -> None:
    assert send(line, content).status_code == status
    assert ask(line).status_code == 200


def test_a_wrong_key_is_refused(line: Line) -> None:
    assert send(line, "{}", key="bl_wrong").status_code == 401
    assert ask(line).status_code == 200
