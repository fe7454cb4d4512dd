"""Bad requests: each gets its own 4xx in OpenAI's shape, is never queued, and the next good request works."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from tests.unit.services.gateway.line import HEADERS, Line

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
USER: Final = {"role": "user", "content": "Hi"}
GOOD_CHAT: Final[dict[str, Any]] = {"model": "pocket", "messages": [USER]}
GOOD_TEXT: Final[dict[str, Any]] = {"model": "pocket", "prompt": "Hi"}
SCHEMA_PATH = "response_format.json_schema.schema"


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


TOOL: Final = {"type": "function", "function": {"name": "f"}}

# (name, fields over a good body, status, param or None for any)
Case = tuple[str, dict[str, Any], int, str | None]

WRONG_TYPES: Final[dict[str, list[Any]]] = {
    "model": [None, 1, [], {}, True, ""],
    "stream": ["true", 1, [], {}],
    "max_tokens": ["5", 1.5, True, [], 0, -1],
    "n": ["1", 1.5, True, 0, -1, 9, 10**6],
    "temperature": ["0", [], True, -0.1, 2.1, -1],
    "top_p": ["1", [], 0, -0.5, 1.1],
    "top_k": ["1", 1.5, 1e9, True, 0, -1, 4097, 10**9],
    "min_p": ["0", -0.1, 2],
    "repetition_penalty": ["1", 0, -1, 11, 1e-320],
    "presence_penalty": ["0", -2.5, 2.5],
    "frequency_penalty": ["0", -2.5, 2.5],
    "min_tokens": ["0", -1, 1.5],
    "seed": ["1", 1.5, True, -(1 << 63) - 1, 1 << 64],
    "stop": [1, {}, [1], [""], "", ["x"] * 17, ["x" * 257], ["x"] * 1000],
    "stop_token_ids": ["1", [-1], [4096], [999999], [1.5], list(range(65))],
    "allowed_token_ids": [[], [-1], [4096], [True], [1] * 2000],
    "logit_bias": [
        [],
        {"x": 1},
        {"-1": 1},
        {"999999": 5},
        {"1": 101},
        {"1": "1"},
        {"1": None},
        {"01": 1, "1": 1},
    ],
    "ignore_eos": ["x", 1],
    "cache": ["x", 1],
    "cache_salt": ["", 1, "x" * 129],
    "reuse": ["prefill", True, ""],
    "prompt_logprobs": ["1", True, -1, 1.5, 21],
    "speculation": [
        "mtp",
        {},
        {"drafter": "eagle"},
        {"drafter": "mtp", "k": -1},
        {"drafter": "mtp", "k": 17},
        {"drafter": "mtp", "depth": 2},
    ],
    "priority": ["urgent", 1],
    "stream_options": [{"include_usage": True}, {"include_usage": 1}, {"other": True}, [], "x"],
    "return_token_ids": [1],
    "metadata": ["x", {"a": 1}],
    "user": [1],
    "session_id": [1, "", "x" * 257],
}


def _name(value: Any) -> str:
    return json.dumps(value)[:24]


def typed_cases() -> list[tuple[str, str, dict[str, Any], str]]:
    """Wrong types and ranges of the fields that both endpoints share; alternating between them."""
    cases = []
    for field, values in WRONG_TYPES.items():
        for place, value in enumerate(values):
            path, good = (CHAT, GOOD_CHAT) if place % 2 == 0 else (TEXT, GOOD_TEXT)
            cases.append((f"{field}={_name(value)}", path, good | {field: value}, field))
    return cases


def message_cases() -> list[Case]:
    """Conversations that cannot be."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    bad_messages: list[tuple[str, Any, str]] = [
        ("empty messages", [], "messages"),
        ("messages null", None, "messages"),
        ("messages a string", "Hi", "messages"),
        ("messages an object", {}, "messages"),
        ("message a string", ["Hi"], "messages[0]"),
        ("message null", [None], "messages[0]"),
        ("no role", [{"content": "x"}], "messages[0].role"),
        ("unknown role", [{"role": "bot", "content": "x"}], "messages[0].role"),
        ("role a number", [{"role": 1, "content": "x"}], "messages[0].role"),
        ("no content", [{"role": "user"}], "messages[0].content"),
        ("content null", [{"role": "user", "content": None}], "messages[0].content"),
        ("content a number", [{"role": "user", "content": 1}], "messages[0].content"),
        ("content an object", [{"role": "user", "content": {}}], "messages[0].content"),
        (
            "FR-62 image part",
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type",
        ),
        (
            "part without text",
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
        ),
        (
            "second part bad",
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": 1}]}],
            "messages[0].content[1].text",
        ),
        ("part a string", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ("unknown member", [USER | {"mood": "good"}], "messages[0].mood"),
        ("second message bad", [USER, {"role": "assistant", "content": 1}], "messages[1].content"),
        ("tool without id", [USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ("tool calls an object", [USER, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls"),
        (
            "call without function",
            [USER, {"role": "assistant", "tool_calls": [{"id": "x", "type": "function"}]}],
            "messages[1].tool_calls[0].function",
        ),
        (
            "call arguments an object",
            [
                USER,
                {"role": "assistant", "tool_calls": [call | {"function": {"name": "f", "arguments": {}}}]},
            ],
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            "call of another type",
            [USER, {"role": "assistant", "tool_calls": [call | {"type": "custom"}]}],
            "messages[1].tool_calls[0].type",
        ),
        ("name a number", [USER | {"name": 1}], "messages[0].name"),
        ("FR-63 the template refuses", [USER, {"role": "system", "content": "late"}], "messages"),
        ("too many messages", [USER] * 2049, "messages"),
        ("FR-53 prompt far over the window", [{"role": "user", "content": "x" * 3_000_000}], "messages"),
        ("FR-53 prompt over the window", [{"role": "user", "content": "word " * 6000}], "messages"),
    ]
    return [(name, {"messages": value}, 400, param) for name, value, param in bad_messages]


CHAT_CASES: Final[list[Case]] = [
    *message_cases(),
    ("unknown model", {"model": "gpt-nine"}, 404, "model"),
    ("unknown field", {"temprature": 1}, 400, "temprature"),
    ("reasoning_effort is not ours", {"reasoning_effort": "low"}, 400, "reasoning_effort"),
    ("echo of a conversation", {"echo": True}, 400, "echo"),
    ("max_tokens 0, even to score", {"max_tokens": 0, "prompt_logprobs": 1}, 400, "max_tokens"),
    ("prompt_logprobs in a stream", {"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ("functions are gone", {"functions": []}, 400, "functions"),
    ("logprobs a number", {"logprobs": 1}, 400, "logprobs"),
    ("top_logprobs alone", {"top_logprobs": 2}, 400, "top_logprobs"),
    ("top_logprobs 21", {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("top_logprobs -1", {"logprobs": True, "top_logprobs": -1}, 400, "top_logprobs"),
    ("max_completion_tokens 0", {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ("both limits", {"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_completion_tokens"),
    ("FR-53 max_tokens over the window", {"max_tokens": 5000}, 400, "max_tokens"),
    ("min over max", {"max_tokens": 1, "min_tokens": 2}, 400, "min_tokens"),
    ("min over what is left", {"min_tokens": 4096}, 400, "min_tokens"),
    (
        "min_tokens forbids all that is allowed",
        {"min_tokens": 1, "allowed_token_ids": [5, 6], "stop_token_ids": [5, 6]},
        400,
        "min_tokens",
    ),
    ("another format", {"response_format": {"type": "xml"}}, 400, "response_format.type"),
    (
        "json schema without a name",
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        400,
        "response_format.json_schema.name",
    ),
    ("json schema missing", {"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    ("json schema keyword", {"response_format": json_schema({"not": {}})}, 400, SCHEMA_PATH),
    ("json schema of nothing", {"response_format": json_schema({"enum": []})}, 400, SCHEMA_PATH),
    ("json schema elsewhere", {"response_format": json_schema({"$ref": "http://x/y"})}, 400, SCHEMA_PATH),
    ("json schema too long", {"response_format": json_schema({"const": "x" * 70_000})}, 400, SCHEMA_PATH),
    (
        "json without an end",
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
        400,
        "ignore_eos",
    ),
    (
        "json and an allow list",
        {"response_format": {"type": "json_object"}, "allowed_token_ids": [5]},
        400,
        "allowed_token_ids",
    ),
    ("response_format a string", {"response_format": "text"}, 400, "response_format"),
    ("tools an object", {"tools": {}}, 400, "tools"),
    ("tool of another type", {"tools": [{"type": "web_search"}]}, 400, None),
    ("tool without function", {"tools": [{"type": "function"}]}, 400, "tools[0].function"),
    ("tool without name", {"tools": [{"type": "function", "function": {}}]}, 400, "tools[0].function.name"),
    (
        "tool name",
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        400,
        "tools[0].function.name",
    ),
    (
        "tool schema not an object",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        400,
        "tools[0].function.parameters.type",
    ),
    (
        "tool properties a list",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]},
        400,
        "tools[0].function.parameters.properties",
    ),
    (
        "tool required a string",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": "a"}}}]},
        400,
        "tools[0].function.parameters.required",
    ),
    (
        "strict tool with a keyword that is not followed",
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
            ]
        },
        400,
        "tools[0].function.parameters",
    ),
    ("too many tools", {"tools": [TOOL] * 129}, 400, "tools"),
    ("tool_choice required alone", {"tool_choice": "required"}, 400, "tool_choice"),
    (
        "tool_choice of no tool",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        400,
        "tool_choice.function.name",
    ),
    ("tool_choice alone", {"tool_choice": "auto"}, 400, "tool_choice"),
    ("parallel calls a word", {"tools": [TOOL], "parallel_tool_calls": "no"}, 400, "parallel_tool_calls"),
    ("prompt in a chat", {"prompt": "x"}, 400, "prompt"),
]

TEXT_CASES: Final[list[Case]] = [
    ("FR-54 empty prompt", {"prompt": ""}, 400, "prompt"),
    ("FR-54 list of an empty prompt", {"prompt": [""]}, 400, "prompt[0]"),
    ("FR-54 empty list", {"prompt": []}, 400, "prompt"),
    ("empty ids", {"prompt": [[]]}, 400, "prompt[0]"),
    ("prompt null", {"prompt": None}, 400, "prompt"),
    ("prompt a number", {"prompt": 5}, 400, "prompt"),
    ("prompt an object", {"prompt": {}}, 400, "prompt"),
    ("17 prompts", {"prompt": ["a"] * 17}, 400, "prompt"),
    ("17 id prompts", {"prompt": [[1]] * 17}, 400, "prompt"),
    ("prompts of two kinds", {"prompt": ["a", [1]]}, 400, "prompt[1]"),
    ("an empty one among prompts", {"prompt": ["a", ""]}, 400, "prompt[1]"),
    ("an empty id prompt among prompts", {"prompt": [[1], []]}, 400, "prompt[1]"),
    ("an id out of the vocabulary in the second prompt", {"prompt": [[1], [4096]]}, 400, "prompt"),
    ("a second prompt over the window", {"prompt": [[5], [5] * 4096]}, 400, "prompt"),
    ("id out of the vocabulary", {"prompt": [4096]}, 400, "prompt"),
    ("negative id", {"prompt": [-1]}, 400, None),
    ("fractional id", {"prompt": [1.5]}, 400, None),
    ("ids over the window", {"prompt": [5] * 4096}, 400, "prompt"),
    ("mixed", {"prompt": ["a", 1]}, 400, None),
    ("FR-35 echo that is no switch", {"echo": "yes"}, 400, "echo"),
    ("FR-35 echo of a suffix", {"echo": True, "suffix": "x"}, 400, "suffix"),
    ("echo and best_of", {"echo": True, "best_of": 2, "logprobs": 1}, 400, "best_of"),
    ("echo with logprobs 21", {"echo": True, "logprobs": 21}, 400, "logprobs"),
    ("nothing to say and nothing to tell", {"max_tokens": 0}, 400, "max_tokens"),
    ("nothing to say without an echo", {"max_tokens": 0, "echo": False, "logprobs": 1}, 400, "max_tokens"),
    ("min_tokens over none", {"max_tokens": 0, "echo": True, "min_tokens": 1}, 400, "min_tokens"),
    ("an echo of more than the window", {"prompt": [5] * 4097, "max_tokens": 0, "echo": True}, 400, "prompt"),
    ("prompt_logprobs in a stream", {"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ("suffix", {"suffix": "x"}, 400, "suffix"),
    ("best_of", {"best_of": 2}, 400, "best_of"),
    ("logprobs true", {"logprobs": True}, 400, "logprobs"),
    ("logprobs 21", {"logprobs": 21}, 400, "logprobs"),
    ("logprobs -1", {"logprobs": -1}, 400, "logprobs"),
    ("messages in a completion", {"messages": [USER]}, 400, "messages"),
    ("unknown model", {"model": "../etc/passwd"}, 404, "model"),
]

# (name, body, headers over the good ones, status)
RAW_CASES: Final[list[tuple[str, bytes, dict[str, str], int]]] = [
    ("empty body", b"", {}, 400),
    ("open brace", b"{", {}, 400),
    ("list", b"[]", {}, 400),
    ("string", b'"x"', {}, 400),
    ("null", b"null", {}, 400),
    ("number", b"5", {}, 400),
    ("true", b"true", {}, 400),
    ("cut", b'{"model": "pocket", "messages": [', {}, 400),
    ("trailing comma", b'{"model": "pocket",}', {}, 400),
    ("single quotes", b"{'model': 'pocket'}", {}, 400),
    ("two objects", b"{}{}", {}, 400),
    ("comment", b'{"model": "pocket" /* x */}', {}, 400),
    ("NaN", b'{"model": "pocket", "prompt": "x", "top_p": NaN}', {}, 400),
    ("Infinity", b'{"model": "pocket", "prompt": "x", "temperature": Infinity}', {}, 400),
    ("-Infinity", b'{"model": "pocket", "prompt": "x", "temperature": -Infinity}', {}, 400),
    ("1e999", b'{"model": "pocket", "prompt": "x", "temperature": 1e999}', {}, 400),
    ("5000 digits", b'{"model": "pocket", "prompt": "x", "seed": ' + b"1" * 5000 + b"}", {}, 400),
    ("duplicate keys", b'{"model": "pocket", "prompt": "x", "prompt": "y"}', {}, 400),
    (
        "duplicate keys inside",
        b'{"model": "pocket", "prompt": "x", "metadata": {"a": "1", "a": "2"}}',
        {},
        400,
    ),
    ("invalid UTF-8", b'{"model": "pocket", "prompt": "\xff\xfe"}', {}, 400),
    ("overlong UTF-8", b'{"model": "pocket", "prompt": "\xc0\xaf"}', {}, 400),
    ("half a surrogate pair", b'{"model": "pocket", "prompt": "\\ud800"}', {}, 400),
    ("raw control character", b'{"model": "pocket", "prompt": "\x01"}', {}, 400),
    ("5000 nested arrays", b'{"model": "pocket", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", {}, 400),
    ("100000 open objects", b'{"a":' * 100_000, {}, 400),
    ("UTF-16", '{"model": "pocket"}'.encode("utf-16"), {}, 400),
    ("byte order mark", b"\xef\xbb\xbf{}", {}, 400),
    ("form", b"model=pocket", {"content-type": "application/x-www-form-urlencoded"}, 415),
    ("text", b'{"model": "pocket"}', {"content-type": "text/plain"}, 415),
    ("latin-1", b'{"model": "pocket"}', {"content-type": "application/json; charset=latin-1"}, 415),
    ("gzip", b"\x1f\x8b", {"content-encoding": "gzip"}, 415),
    ("FR-60 huge", b'{"model": "' + b"x" * (5 << 20) + b'"}', {}, 413),
    ("bad key", b"{}", {"authorization": "Bearer bl_unknown"}, 401),
    ("empty key", b"{}", {"authorization": "Bearer "}, 401),
    ("basic", b"{}", {"authorization": "Basic YWxhZGRpbg=="}, 401),
    ("no scheme", b"{}", {"authorization": "bl_test-key"}, 401),
    ("long key", b"{}", {"authorization": "Bearer " + "x" * 300}, 401),
    ("deadline 0", json.dumps(GOOD_TEXT).encode(), {"x-burstline-deadline-s": "0"}, 400),
    ("deadline nan", json.dumps(GOOD_TEXT).encode(), {"x-burstline-deadline-s": "nan"}, 400),
    ("deadline text", json.dumps(GOOD_TEXT).encode(), {"x-burstline-deadline-s": "soon"}, 400),
    ("priority header", json.dumps(GOOD_TEXT).encode(), {"x-burstline-priority": "urgent"}, 400),
]


async def check(line: Line, response: Any, status: int, param: str | None) -> None:
    """The refusal is right, nothing was queued, and a good request still works."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] != "server_error"
    if param is not None:
        assert error["param"] == param, error
    assert line.worker.works == []
    assert (await line.complete(max_tokens=4)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"), [pytest.param(*case[1:], id=case[0]) for case in typed_cases()]
)
async def test_fr_56_fr_57_wrong_types_and_ranges(
    line: Line, path: str, body: dict[str, Any], param: str
) -> None:
    response = await line.client.post(path, json=body)
    await check(line, response, 400, None)
    named = response.json()["error"]["param"]
    assert named == param or named.startswith((f"{param}.", f"{param}["))


@pytest.mark.parametrize(
    ("fields", "status", "param"), [pytest.param(*case[1:], id=case[0]) for case in CHAT_CASES]
)
async def test_chat_refusals(line: Line, fields: dict[str, Any], status: int, param: str | None) -> None:
    await check(line, await line.client.post(CHAT, json=GOOD_CHAT | fields), status, param)


@pytest.mark.parametrize(
    ("fields", "status", "param"), [pytest.param(*case[1:], id=case[0]) for case in TEXT_CASES]
)
async def test_completion_refusals(
    line: Line, fields: dict[str, Any], status: int, param: str | None
) -> None:
    await check(line, await line.client.post(TEXT, json=GOOD_TEXT | fields), status, param)


@pytest.mark.parametrize(
    ("body", "headers", "status"), [pytest.param(*case[1:], id=case[0]) for case in RAW_CASES]
)
async def test_fr_59_bodies_that_are_not_ours(
    line: Line, body: bytes, headers: dict[str, str], status: int
) -> None:
    sent = {**HEADERS, "content-type": "application/json", **headers}
    await check(line, await line.client.post(TEXT, content=body, headers=sent), status, None)


@pytest.mark.parametrize("name", ["model", "messages"])
async def test_missing_fields(line: Line, name: str) -> None:
    body = {key: value for key, value in GOOD_CHAT.items() if key != name}
    await check(line, await line.client.post(CHAT, json=body), 400, name)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("PUT", TEXT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/", 404),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/chat/completions/", 404),
    ],
)
async def test_paths_and_methods(line: Line, method: str, path: str, status: int) -> None:
    await check(line, await line.client.request(method, path), status, None)


async def test_a_wrong_path_or_method_is_told_with_what_there_is(line: Line) -> None:
    assert "/openapi.json" in (await line.client.get("/")).json()["error"]["message"]
    assert (await line.client.get(CHAT)).json()["error"]["message"] == "this path takes POST"


async def test_an_object_is_called_an_object(line: Line) -> None:
    error = (await line.chat(speculation="mtp")).json()["error"]
    assert (error["param"], error["message"]) == ("speculation", "speculation: Input should be an object")


async def test_fr_53_the_error_carries_the_three_numbers(line: Line) -> None:
    error = (await line.chat(max_tokens=4096)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    assert "4096" in error["message"]


def test_there_are_more_than_two_hundred_cases() -> None:
    assert len(typed_cases()) + len(CHAT_CASES) + len(TEXT_CASES) + len(RAW_CASES) > 200
