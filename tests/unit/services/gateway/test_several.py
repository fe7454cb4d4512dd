"""Several prompts in one call: one answer, choices numbered on, the sum of the usage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.gateway.several import summed
from shared.protocol.messages import Failure, unpack_tokens
from tests.unit.services.gateway.line import HEADERS, Line, Work, ids, running_line, says
from tests.unit.services.gateway.test_echo import logprobs_of, text_of
from tests.unit.services.gateway.test_resume import told

PROMPTS = ["one two", "three", "four five six"]


def echoing(size: int = 1) -> Any:
    """A worker that says each prompt's own text again."""

    async def script(work: Work) -> None:
        tokens = list(unpack_tokens(work.request.prompt))
        await work.start()
        await work.score()
        for choice in range(work.request.choices if work.request.max_tokens else 0):
            for begin in range(0, len(tokens), size):
                await work.burst(tokens[begin : begin + size], choice)
        await work.end("length")

    return script


@pytest.mark.parametrize("prompts", [PROMPTS, [ids(text) for text in PROMPTS]], ids=["texts", "ids"])
@pytest.mark.parametrize("choices", [1, 2])
async def test_choices_are_numbered_on_and_usage_is_the_sum(
    line: Line, prompts: object, choices: int
) -> None:
    line.worker.script = echoing()
    body = (await line.complete(prompt=prompts, n=choices, max_tokens=9)).json()
    expected = [text for text in PROMPTS for _ in range(choices)]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(3 * choices))
    count = sum(len(ids(text)) for text in PROMPTS)
    assert body["usage"]["prompt_tokens"] == count
    assert body["usage"]["completion_tokens"] == count * choices
    assert body["usage"]["total_tokens"] == count * (1 + choices)
    assert len(body["burstline"]["prompts"]) == 3
    assert len({block["request_id"] for block in body["burstline"]["prompts"]}) == 3


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_tells_the_same_one_prompt_after_the_other(line: Line, usage: bool) -> None:
    line.worker.script = echoing()
    fields: dict[str, Any] = {"prompt": PROMPTS, "n": 2, "echo": True, "logprobs": 1, "max_tokens": 9}
    whole = (await line.complete(**fields)).json()
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = told(await line.complete(stream=True, **fields, **options))
    for index in range(6):
        assert text_of(events, index) == whole["choices"][index]["text"] == PROMPTS[index // 2] * 2
        assert logprobs_of(events, index) == whole["choices"][index]["logprobs"]
    assert {name for name, _ in events} == {None}, "nobody can come back"
    assert len({data["id"] for _, data in events if data != "[DONE]"}) == 1
    last = events[-2][1]
    assert len(last["burstline"]["prompts"]) == 3
    assert last.get("usage") == (whole["usage"] if usage else None)
    finishes = [choice["finish_reason"] for _, data in events[:-1] for choice in data["choices"]]
    assert finishes.count("length") == 6


async def test_an_evaluation_harness_scores_several_texts_in_one_call(line: Line) -> None:
    body = (
        await line.complete(prompt=[ids(text) for text in PROMPTS], echo=True, logprobs=1, max_tokens=0)
    ).json()
    for choice, text in zip(body["choices"], PROMPTS, strict=True):
        assert choice["text"] == text
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids(text))


async def test_all_are_on_the_queue_before_the_first_has_ended(line: Line) -> None:
    all_there = asyncio.Barrier(3)

    async def script(work: Work) -> None:
        async with asyncio.timeout(10):
            await all_there.wait()
        await says("Yes.")(work)

    line.worker.script = script
    assert len((await line.complete(prompt=PROMPTS)).json()["choices"]) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_fails_fails_the_call_and_cancels_the_others(line: Line, stream: bool) -> None:
    async def script(work: Work) -> None:
        if unpack_tokens(work.request.prompt) != tuple(ids(PROMPTS[1])):
            await says("Fine.")(work) if work.request.request_id.endswith("-0") else None
            return
        await work.start()
        await work.end(
            "error", failure=Failure(code="engine_fault", message="NaN", status=500, retry_after_s=None)
        )

    line.worker.script = script
    response = await line.complete(prompt=PROMPTS, stream=stream)
    if stream:
        assert told(response)[-2][1]["error"]["code"] == "engine_fault"
    else:
        assert response.json()["error"]["code"] == "engine_fault"
    await line.gateway.dispatcher.close()
    cancelled = {work.request.request_id[-1]: len(work.cancels) for work in line.worker.works}
    assert cancelled["0"] == 0
    assert line.gateway.slots.in_flight == 0


async def test_each_counts_against_the_tenants_concurrency() -> None:
    async with running_line(max_in_flight=2) as line:
        assert (await line.complete(prompt=PROMPTS)).status_code == 503
        assert line.worker.works == []
        assert (await line.complete(prompt=PROMPTS[:2])).status_code == 200
        assert line.gateway.slots.in_flight == 0


async def test_a_key_stands_for_one_prompt(line: Line) -> None:
    response = await line.client.post(
        "/v1/completions",
        json={"model": "pocket", "prompt": PROMPTS},
        headers=HEADERS | {"idempotency-key": "k"},
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert line.worker.works == []


def test_usage_is_summed_member_by_member() -> None:
    assert summed([{"a": 1, "b": {"c": 2}}, {"a": 3, "b": {"c": 5}}]) == {"a": 4, "b": {"c": 7}}
