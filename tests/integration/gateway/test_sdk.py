"""OpenAI's own SDK against the gateway, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from shared.asgi import serve
from tests.unit.services.gateway.line import KEY, Line, running_line, says

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    async with running_line(keep_alive_s=0.05) as found:
        yield found


@pytest.fixture
async def client(line: Line) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serve(line.app) as port,
        openai.AsyncOpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0) as found,
    ):
        yield found


async def test_models_list(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["pocket"]
    assert (await client.models.retrieve("pocket")).owned_by == "burstline"


async def test_chat_whole(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="pocket", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None


async def test_fr_52_chat_stream_with_usage_and_comments(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="pocket", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "Hello there."
    assert usage is not None


async def test_an_answer_with_tool_calls_can_be_sent_back(client: openai.AsyncOpenAI, line: Line) -> None:
    line.worker.script = says('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    answer = await client.chat.completions.create(model="pocket", messages=MESSAGES, tools=TOOLS)
    message = answer.choices[0].message
    assert message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
    line.worker.script = says("It is 2.")
    again = await client.chat.completions.create(
        model="pocket", messages=[*MESSAGES, message.model_dump(), result], tools=TOOLS
    )
    assert again.choices[0].message.content == "It is 2."


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="pocket", prompt="Hi", logprobs=1)
    assert answer.choices[0].text == "Hello there."
    stream = await client.completions.create(model="pocket", prompt="Hi", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello there."


async def test_errors_have_their_classes(client: openai.AsyncOpenAI, line: Line) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="none", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="pocket", messages=[])
    assert refused.value.param == "messages"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="bl_unknown").models.list()
    line.gateway.fleet.note(line.worker.heartbeat(ready=False))
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="pocket", messages=MESSAGES)


async def test_a_prompt_is_echoed_and_scored(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="pocket", prompt="one two three", echo=True, logprobs=2, max_tokens=0
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("one two three", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
