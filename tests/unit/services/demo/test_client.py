"""The demo's client against scripted streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.demo.client import Chat
from services.embedded.faults import Cancelled, EmbeddedFault

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 7},
}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def server(chunks: list[dict[str, Any]], status: int = 200) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer bl_x"
        body = json.loads(request.content)
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        lines = [
            ": keep-alive\n\n",
            *(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks),
            "data: [DONE]\n\n",
        ]
        return httpx.Response(status, headers={"x-trace-id": "t0"}, content="".join(lines))

    return httpx.MockTransport(answer)


def chat(chunks: list[dict[str, Any]], **options: Any) -> Chat:
    return Chat("http://test", "bl_x", transport=server(chunks), **options)


def test_text_usage_and_details_are_folded() -> None:
    shown: list[str] = []
    last = {"choices": [], "usage": USAGE, "burstline": {"tokens_per_verify": 2.0, "trace_id": "t1"}}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    answer = chat([delta(role="assistant"), delta(content="Hel"), delta(content="lo"), end, last]).ask(
        {}, show=shown.append
    )
    assert (answer.text, shown, answer.finish_reason) == ("Hello", ["Hel", "lo"], "stop")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (10, 7, 4)
    assert answer.trace_id == "t1"
    assert answer.details["tokens_per_verify"] == 2.0
    assert 0 < answer.first_token_s <= answer.total_s


def test_tool_calls_in_pieces_are_joined_and_sent_back_whole() -> None:
    pieces = [
        {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a": '}},
        {"index": 0, "function": {"arguments": "1}"}},
        {"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    message = chat([delta(tool_calls=[piece]) for piece in pieces]).ask({}).message()
    assert message["content"] is None
    assert [(call["id"], call["function"]) for call in message["tool_calls"]] == [
        ("c0", {"name": "f", "arguments": '{"a": 1}'}),
        ("c1", {"name": "g", "arguments": "{}"}),
    ]


def test_an_error_in_the_stream_is_a_fault() -> None:
    with pytest.raises(EmbeddedFault, match="worker died"):
        chat([delta(content="a"), {"error": {"message": "worker died"}}]).ask({})


def test_a_refusal_is_a_fault_with_the_body() -> None:
    client = Chat("http://test", "bl_x", transport=server([], status=401))
    with pytest.raises(EmbeddedFault, match="401"):
        client.ask({})


def test_stop_ends_the_reading() -> None:
    with pytest.raises(Cancelled):
        chat([delta(content="a")], stop=lambda: True).ask({})
