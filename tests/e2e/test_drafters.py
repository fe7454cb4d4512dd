"""Every drafter over REST: the same answers however they are drafted, streamed or not, and a trace that says who drafted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.demo.client import Answer, Chat
from services.demo.script import INSTRUCTIONS, TOOLS, Message
from services.embedded.waiting import until
from shared.telemetry import TRACES_FILE
from shared.tracestore import StoredSpan, TraceStore
from tests.e2e.conftest import Line

AWKWARD = (
    'Say "yes" and “no” — l\'été, naïve façade, 東京, 한국어, שלום, 👩‍👩‍👧 🇪🇺.',
    "Pepe ❤️ 🐈 고양이: convert 5 km to miles, then 12 feet to m.",
    'Quote {"a": "b\\"c", "d": ["é", "🙂"]} and `code` as they are.',
)
DRAFTERS = ("auto", "block", "mtp", "ngram")


def ask(line: Line, messages: list[Message], drafter: str, **more: Any) -> Answer:
    body = {
        "model": "pocket",
        "messages": messages,
        "temperature": 0.7,
        "seed": 11,
        "max_tokens": 40,
        "cache": False,
        "speculation": {"drafter": drafter, "k": 0 if drafter == "none" else 7},
    }
    chat = Chat(line.info.gateway_url, line.key)
    try:
        return chat.ask(body | more)
    finally:
        chat.close()


def whole(line: Line, messages: list[Message], drafter: str) -> str:
    """The same, not streamed."""
    with line.client() as client:
        response = client.post(
            "/v1/chat/completions",
            json={
                "model": "pocket",
                "messages": messages,
                "temperature": 0.7,
                "seed": 11,
                "max_tokens": 40,
                "cache": False,
                "speculation": {"drafter": drafter, "k": 7},
            },
        )
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def spans(line: Line, trace_id: str, name: str) -> list[StoredSpan]:
    store = TraceStore(line.folder / TRACES_FILE)
    until(lambda: any(span.name == name for span in store.read(trace_id)), timeout_s=60)
    return [span for span in store.read(trace_id) if span.name == name]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fr_30_fr_32_streamed_and_whole_answers_are_plain_decodes(line: Line, drafter: str) -> None:
    """Bursts of several tokens end anywhere, inside characters too."""
    for text in AWKWARD:
        messages: list[Message] = [{"role": "user", "content": text}]
        plain = ask(line, messages, "none")
        assert ask(line, messages, drafter).text == plain.text
        assert whole(line, messages, drafter) == plain.text


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fr_42_fr_44_tool_calls_come_whole_and_the_stream_ends(line: Line, drafter: str) -> None:
    messages: list[Message] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": "Convert 5 km to miles."},
    ]
    plain = ask(line, messages, "none", tools=TOOLS, temperature=0)
    answer = ask(line, messages, drafter, tools=TOOLS, temperature=0)
    assert answer.said() == plain.said()
    assert answer.finish_reason == plain.finish_reason
    assert answer.finish_reason
    for call in answer.tool_calls:
        json.loads(call["function"]["arguments"])


def test_the_trace_says_which_drafter_was_chosen_and_why(line: Line) -> None:
    messages: list[Message] = [{"role": "user", "content": "What is a burst? Tell me in two sentences."}]
    answer = ask(line, messages, "auto")
    (span,) = spans(line, answer.trace_id, "engine.drafter")
    told = span.attributes
    assert told["burstline.reason"] in ("gain", "probe", "no_gain")
    gains = {name.rpartition(".")[2] for name in told if name.startswith("burstline.gain.")}
    assert gains == {"block", "mtp", "ngram"}
    assert told["burstline.drafter"] in gains | {"none"}


def test_the_shipped_block_drafter_drafts(line: Line) -> None:
    messages: list[Message] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": "Convert 5 km to miles."},
    ]
    answer = ask(line, messages, "block", tools=TOOLS, temperature=0)
    assert answer.details["tokens_per_verify"] > 2.0
