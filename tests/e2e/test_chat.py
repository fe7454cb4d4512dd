"""An agent's conversation through the whole line: reuse, isolation, equality, trace, books."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.demo.about import about
from services.demo.client import Answer, Chat
from services.demo.report import reuse_faults, turn_of
from services.demo.script import INSTRUCTIONS, QUESTIONS, TOOLS, Message
from services.embedded.waiting import until
from shared.telemetry import TRACES_FILE
from shared.tracestore import TraceStore
from tests.e2e.conftest import Line


def body(messages: list[Message], **more: Any) -> dict[str, Any]:
    return {
        "model": "pocket",
        "messages": messages,
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 48,
    } | more


@pytest.fixture(scope="module")
def talk(line: Line) -> tuple[list[Message], list[Answer]]:
    """Three turns; each answer goes into the next request as it came."""
    chat = Chat(line.info.gateway_url, line.key)
    messages: list[Message] = [{"role": "system", "content": INSTRUCTIONS}]
    answers: list[Answer] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answers.append(chat.ask(body(messages)))
        messages.append(answers[-1].message())
        for call in answers[-1].tool_calls:
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": '{"result": 3.11, "unit": "miles"}'}
            )
    chat.close()
    return messages, answers


def last_request(messages: list[Message]) -> list[Message]:
    """The conversation as it was when the third question was asked."""
    return messages[: max(index for index, message in enumerate(messages) if message["role"] == "user") + 1]


def test_turns_two_and_three_start_from_the_captures_before_them(
    talk: tuple[list[Message], list[Answer]],
) -> None:
    _, answers = talk
    header = about("pocket").header_tokens
    assert reuse_faults([turn_of(answer) for answer in answers], header) == []
    assert answers[1].cached_tokens > 0
    assert answers[2].cached_tokens > answers[1].cached_tokens
    assert all(answer.details["tokens_per_verify"] >= 1.0 for answer in answers)


@pytest.mark.parametrize(
    "how",
    [
        {"cache": False},
        {"speculation": {"drafter": "none", "k": 0}},
        {"speculation": {"drafter": "none", "k": 0}, "cache": False},
        {"speculation": {"drafter": "mtp", "k": 1}},
    ],
    ids=["no-cache", "plain", "plain-no-cache", "k1"],
)
def test_the_answer_is_the_same_however_it_is_computed(
    line: Line, talk: tuple[list[Message], list[Answer]], how: dict[str, Any]
) -> None:
    messages, answers = talk
    chat = Chat(line.info.gateway_url, line.key)
    again = chat.ask(body(last_request(messages), **how))
    chat.close()
    assert (again.said(), again.completion_tokens) == (answers[2].said(), answers[2].completion_tokens)
    if "cache" in how:
        assert again.cached_tokens == 0


def test_a_sampled_answer_is_the_same_with_and_without_speculation(line: Line) -> None:
    """Position-keyed noise: one seed, one stream."""
    asked = body([{"role": "user", "content": "Hello!"}], temperature=0.9, seed=7, max_tokens=32)
    chat = Chat(line.info.gateway_url, line.key)
    drafted = chat.ask(asked)
    plain = chat.ask(asked | {"speculation": {"drafter": "none", "k": 0}, "cache": False})
    chat.close()
    assert drafted.said() == plain.said()


def test_fr_84_another_tenant_gets_nothing_of_it(
    line: Line, talk: tuple[list[Message], list[Answer]]
) -> None:
    messages, answers = talk
    assert line.burstline("tenant", "create", "stranger").returncode == 0
    made = line.burstline("key", "create", "stranger")
    chat = Chat(line.info.gateway_url, made.stdout.strip())
    foreign = chat.ask(body(last_request(messages)))
    chat.close()
    assert foreign.cached_tokens == 0
    assert foreign.said() == answers[2].said()


def test_one_trace_from_http_to_sql(line: Line, talk: tuple[list[Message], list[Answer]]) -> None:
    _, answers = talk
    store = TraceStore(line.folder / TRACES_FILE)
    trace_id = answers[1].trace_id
    services = {"gateway", "worker", "broker"}
    assert until(lambda: {span.service for span in store.read(trace_id)} == services, timeout_s=60)
    shown = line.burstline("trace", trace_id[:12], "--json", "-")
    assert shown.returncode == 0, shown.stderr
    spans = json.loads(shown.stdout)["spans"]
    assert {span["trace_id"] for span in spans} == {trace_id}
    known = {span["span_id"] for span in spans}
    assert sum(span["parent_id"] not in known for span in spans) == 1, "one root, and everything hangs on it"
    assert any(span["attributes"].get("db.system.name") == "postgresql" for span in spans)
    assert any(span["name"] == "engine.burst" for span in spans)


def test_the_books_balance(line: Line, talk: tuple[list[Message], list[Answer]], tmp_path: Path) -> None:
    audit = line.burstline("audit", "--json", str(tmp_path / "audit.json"))
    assert audit.returncode == 0, audit.stdout + audit.stderr
    told = json.loads((tmp_path / "audit.json").read_text())
    assert all(bar["holds"] for bar in told["bars"])
