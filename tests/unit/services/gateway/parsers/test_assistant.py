"""Thinking, tool calls and content, told apart."""

from __future__ import annotations

import pytest

from services.gateway.parsers.assistant import AssistantParser
from services.gateway.parsers.events import Content, Event, Reasoning, ToolCall
from services.gateway.parsers.tools import parse_call
from shared.control import THINK, TOOLS

MARKERS = THINK | TOOLS


def run(*items: str, thinking: bool = False) -> list[Event]:
    """Items that are markers go in as markers, the rest as text."""
    parser = AssistantParser(markers=MARKERS, thinking=thinking)
    events: list[Event] = []
    for item in items:
        events.extend(parser.marker(item) if item in MARKERS else parser.text(item))
    return [*events, *parser.finish()]


def texts(events: list[Event]) -> tuple[str, str]:
    """(content, reasoning)."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    return content, "".join(event.text for event in events if isinstance(event, Reasoning))


def test_content_alone() -> None:
    assert run("Hi", " there ") == [Content(text="Hi"), Content(text=" there"), Content(text=" ")]


def test_thinking_then_content() -> None:
    assert texts(run("<think>", "\n", "so", "</think>", "\n\n", "Yes")) == ("Yes", "so")


def test_a_prompt_that_opens_the_thinking() -> None:
    assert texts(run("so", "</think>", "Yes", thinking=True)) == ("Yes", "so")


def test_white_space_around_calls_is_dropped_and_elsewhere_kept() -> None:
    call = '{"name": "f", "arguments": {}}'
    events = run("a \n", "<tool_call>", call, "</tool_call>", "\n", "<tool_call>", call, "</tool_call>", "\n")
    assert events == [
        Content(text="a"),
        ToolCall(index=0, name="f", arguments="{}"),
        ToolCall(index=1, name="f", arguments="{}"),
    ]
    assert texts(run("a \n", "b"))[0] == "a \nb"


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "{",
        "[]",
        '{"name": "f"',
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": 1}',
        "not json",
    ],
)
def test_fr_44_a_broken_call_is_text(broken: str) -> None:
    assert (
        texts(run("x\n", "<tool_call>", broken, "</tool_call>", "y"))[0]
        == f"x\n<tool_call>{broken}</tool_call>y"
    )


def test_fr_44_a_call_that_never_ends_is_text() -> None:
    assert texts(run("<tool_call>", '{"name": "f"'))[0] == '<tool_call>{"name": "f"'


def test_a_call_inside_a_call_breaks_the_first() -> None:
    events = run("<tool_call>", "x", "<tool_call>", '{"name": "f"}', "</tool_call>")
    assert texts(events)[0] == "<tool_call>x"
    assert events[-1] == ToolCall(index=0, name="f", arguments="{}")


@pytest.mark.parametrize("marker", ["</think>", "</tool_call>"])
def test_an_end_without_a_beginning_is_text(marker: str) -> None:
    assert texts(run("a", marker, "b"))[0] == f"a{marker}b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('\n{"name": "f", "arguments": {"a":1,  "b": [2]}}\n', ("f", '{"a":1,  "b": [2]}')),
        ('{"arguments": {}, "name": "g"}', ("g", "{}")),
        ('{"name": "f"}', ("f", "{}")),
        ('{"name": "f", "name": "g"}', None),
        ('{"name": "f"} {}', None),
        ("{}", None),
        ('{"name": "f", "arguments": "{}"}', None),
        ("[" * 100_000, None),
    ],
)
def test_parse_call_keeps_the_models_spelling(text: str, expected: tuple[str, str] | None) -> None:
    assert parse_call(text) == expected
