"""The chat template under sandboxed jinja2 alone: history only ever appends, and impossible input is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

FOLDER = Path(__file__).parents[4] / "models" / "pocket"


class RefusedError(Exception):
    """What `raise_exception` becomes here."""


def _refuse(message: str) -> NoReturn:
    raise RefusedError(message)


def render(
    messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, header: bool = False
) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    template = environment.from_string((FOLDER / "chat_template.jinja").read_text())
    return template.render(messages=messages, tools=tools, add_generation_prompt=header)


HEADER = "<|im_start|>assistant\n"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
words = st.text(min_size=0, max_size=20)
calls = st.lists(
    st.builds(lambda name, value: {"function": {"name": name, "arguments": json.dumps({"x": value})}}, st.sampled_from("fgh"), words),
    min_size=1, max_size=3,
)  # fmt: skip
turns = st.one_of(
    st.builds(lambda t: {"role": "user", "content": t}, words),
    st.builds(lambda t: {"role": "assistant", "content": t}, words),
    st.builds(lambda t, c: {"role": "assistant", "content": t, "tool_calls": c}, st.none() | words, calls),
    st.builds(lambda t: {"role": "tool", "content": t, "tool_call_id": "1"}, words),
    st.builds(lambda t: {"role": "user", "content": [{"type": "text", "text": t}]}, words),
)
systems = st.lists(st.builds(lambda t: {"role": "system", "content": t}, words), max_size=1)


@settings(deadline=None, max_examples=60)
@given(systems, st.lists(turns, min_size=1, max_size=6), st.sampled_from([None, [TOOL], [TOOL, TOOL]]))
def test_every_history_is_a_prefix_of_the_next(
    system: list[dict[str, Any]], history: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    messages = system + history
    whole = render(messages, tools=tools)
    assert render(messages, tools=tools, header=True) == whole + HEADER
    for count in range(1, len(messages)):
        assert whole.startswith(render(messages[:count], tools=tools))


def test_a_turn_as_the_model_reads_it() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Do f."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"y": 2}'},
    ]
    assert render(messages, header=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nDo f.<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
        '<|im_start|>user\n<tool_response>\n{"y": 2}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
    )


def test_tools_stand_in_the_system_turn() -> None:
    text = render([{"role": "user", "content": "hi"}], tools=[TOOL])
    assert text.startswith("<|im_start|>system\n# Tools\n")
    line = text.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(line) == TOOL


def test_arguments_given_as_an_object_render_as_json() -> None:
    call = {"function": {"name": "f", "arguments": {"x": [1, 2]}}}
    text = render([{"role": "assistant", "content": None, "tool_calls": [call]}])
    body = text.split("<tool_call>\n")[1].split("\n</tool_call>")[0]
    assert json.loads(body) == {"name": "f", "arguments": {"x": [1, 2]}}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "wizard", "content": "hi"}],
        [{"role": "user", "content": "hi"}, {"role": "system", "content": "late"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_impossible_input_is_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RefusedError):
        render(messages)
