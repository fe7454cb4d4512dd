"""Answers that follow a grammar, through the real line with drafters on: valid for everybody, and the same as without drafts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from services.demo.script import POCKET_SCRIPT
from tests.e2e.conftest import Line

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "steps": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 2,
            "maxItems": 3,
        },
        "done": {"type": "boolean"},
    },
    "required": ["title", "steps", "done"],
    "additionalProperties": False,
}
PROSE: dict[str, Any] = {
    "model": "pocket",
    "messages": [{"role": "user", "content": "What is a burst? Answer in plain words."}],
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "plan", "schema": SCHEMA, "strict": True},
    },
    "max_tokens": 500,
    "temperature": 0,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["value"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("convert", "count")
]
DRAFTERS: list[dict[str, Any] | None] = [
    {"drafter": "none"}, {"drafter": "mtp", "k": 3}, {"drafter": "block", "k": 7}, {"drafter": "ngram", "k": 4}, None,
]  # fmt: skip


def ask(line: Line, **fields: Any) -> dict[str, Any]:
    given = {name: value for name, value in fields.items() if value is not None}
    with line.client() as client:
        answer = client.post("/v1/chat/completions", json=PROSE | given)
    assert answer.status_code == 200, answer.text + line.logs()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_fr_40_thirty_at_once_that_want_prose_give_valid_json_whoever_drafts(line: Line) -> None:
    with ThreadPoolExecutor(30) as pool:
        asked = [
            pool.submit(
                ask, line, speculation=DRAFTERS[place % 5], seed=place // 5, temperature=place // 5 / 5
            )
            for place in range(30)
        ]
        answers = [each.result() for each in asked]
    for first in range(0, 30, 5):
        assert len({answer["message"]["content"] for answer in answers[first : first + 5]}) == 1
    for answer in answers:
        value = json.loads(answer["message"]["content"])
        assert list(value) == ["title", "steps", "done"]
        assert 2 <= len(value["steps"]) <= 3
        assert len(value["title"]) <= 20
        assert answer["finish_reason"] == "stop"


def test_a_budget_that_ends_in_mid_json_says_length(line: Line) -> None:
    short, whole = ask(line, max_tokens=9), ask(line)
    assert short["finish_reason"] == "length"
    assert whole["message"]["content"].startswith(short["message"]["content"])


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"convert", "count"}), ({"type": "function", "function": {"name": "count"}}, {"count"})],
    ids=["required", "named"],
)
def test_a_call_that_is_asked_for_comes_with_arguments_of_its_schema(
    line: Line, choice: object, names: set[str]
) -> None:
    answer = ask(
        line,
        response_format={"type": "text"},
        tools=TOOLS,
        tool_choice=choice,
        stop=["</tool_call>\n<tool_call>"],
    )
    call = answer["message"]["tool_calls"][0]["function"]
    assert call["name"] in names
    arguments = json.loads(call["arguments"])
    assert list(arguments) == ["value"]
    assert 0 <= arguments["value"] <= 99


def test_a_json_object_and_a_raw_prompt_are_served_too(line: Line) -> None:
    with line.client() as client:
        answer = client.post(
            "/v1/completions",
            json={
                "model": "pocket",
                "prompt": "A list: ",
                "max_tokens": 200,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "n",
                        "schema": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
                    },
                },
            },
        )
    assert answer.status_code == 200, answer.text
    assert set(json.loads(answer.json()["choices"][0]["text"])) <= {1, 2}


CONVERT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": POCKET_SCRIPT.instructions},
        {"role": "user", "content": POCKET_SCRIPT.questions[-1]},
    ],
    "response_format": {"type": "text"},
    "return_token_ids": True,
}
LOOSE: list[dict[str, Any]] = POCKET_SCRIPT.tools


def strict(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [tool | {"function": tool["function"] | {"strict": True}} for tool in tools]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": LOOSE, "tool_choice": "auto", "ignore_eos": True, "max_tokens": 120},
        {"tools": strict(LOOSE), "tool_choice": "auto"},
        {"tools": LOOSE, "tool_choice": "required"},
        {"tools": LOOSE, "tool_choice": {"type": "function", "function": {"name": "calculate"}}},
    ],
    ids=["auto", "auto strict", "required", "named"],
)
def test_without_parallel_calls_the_stream_is_the_same_up_to_its_first_call(
    line: Line, fields: dict[str, Any]
) -> None:
    free = ask(line, **CONVERT, **fields)
    for drafter in DRAFTERS:
        one = ask(line, **CONVERT, **fields, parallel_tool_calls=False, speculation=drafter)
        assert len(one["message"]["tool_calls"]) == 1
        assert one["finish_reason"] == "tool_calls"
        assert one["token_ids"] == free["token_ids"][: len(one["token_ids"])]
        assert one["message"]["tool_calls"][0]["function"] == free["message"]["tool_calls"][0]["function"]
        if "ignore_eos" in fields:
            assert len(one["token_ids"]) < len(free["token_ids"])


def test_a_stream_without_parallel_calls_tells_one_call_and_counts_what_was_generated(line: Line) -> None:
    fields = {"tools": LOOSE, "ignore_eos": True, "max_tokens": 120, "parallel_tool_calls": False}
    whole = ask(line, **CONVERT, **fields)
    body = PROSE | CONVERT | fields | {"stream": True, "stream_options": {"include_usage": True}}
    with line.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    chunks = [json.loads(each[6:]) for each in answer.text.splitlines() if each.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [whole["message"]["tool_calls"][0]["function"]]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == whole["token_ids"]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens"] == len(whole["token_ids"])
