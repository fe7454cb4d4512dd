"""Answers that follow a grammar, through the real line with drafters on: valid for everybody, and the same as without drafts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

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
