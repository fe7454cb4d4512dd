"""Both endpoints, streaming and not, through the whole gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from msgspec import UNSET

from services.gateway.answer import call_id
from services.gateway.resolve import OPEN_WIDTH
from shared.protocol import subjects
from shared.protocol.messages import EntryRef, Failure, unpack_tokens
from tests.unit.services.gateway.line import (
    FINGERPRINT,
    HEADERS,
    MODEL,
    Line,
    Work,
    ids,
    running_line,
    says,
    until_cancelled,
    words,
)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of an SSE body, [DONE] checked and left out."""
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def content(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """Concatenated content deltas of a choice."""
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_chat_answers_in_one_object(line: Line) -> None:
    response = await line.chat(seed=7)
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello there.", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(ids("Hello there.")) + 1
    assert body["usage"]["prompt_tokens"] == len(unpack_tokens(line.worker.works[0].request.prompt))
    assert body["burstline"]["seed"] == 7
    assert body["burstline"]["worker"] == "w1"
    rounds, accepted = body["burstline"]["rounds"], body["burstline"]["accepted"]
    assert (
        body["burstline"]["tokens_per_verify"] == (accepted + rounds) / rounds
    )  # without the prime's own token
    assert body["burstline"]["trace_id"] == response.headers["x-trace-id"]
    assert body["system_fingerprint"] == "fp_" + "f" * 16


@pytest.mark.parametrize(("drafts", "told"), [(True, ("block", 4)), (False, ("none", 0))])
async def test_the_answer_says_what_drafted_and_what_was_asked(
    line: Line, drafts: bool, told: tuple[str, int]
) -> None:
    async def script(work: Work) -> None:
        await work.start()
        await work.burst(ids("Hello there."))
        await work.end(drafts=drafts)

    line.worker.script = script
    block = (await line.chat(speculation={"drafter": "block", "k": 4})).json()["burstline"]
    assert (block["drafter"], block["k"]) == told
    assert block["drafter_asked"] == "block"


async def test_what_was_replayed_is_told_and_is_no_accepted_draft(line: Line) -> None:
    async def script(work: Work) -> None:
        await work.start()
        await work.burst(ids("Hello there."))
        await work.end(drafts=False, replayed=3)

    line.worker.script = script
    body = (await line.chat(speculation={"drafter": "none"})).json()
    assert body["usage"]["completion_tokens_details"] == {"accepted_prediction_tokens": 0}
    block = body["burstline"]
    told = [block[name] for name in ("drafter", "drafted", "accepted", "replayed", "tokens_per_verify")]
    assert told == ["none", 0, 0, 3, 1.0]


async def test_chat_streams_the_same_text(line: Line) -> None:
    response = await line.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert content(chunks) == "Hello there."
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"
    assert chunks[-1]["burstline"]["cache_decision"] == "miss"


async def test_completions_stream_and_whole_agree(line: Line) -> None:
    whole = (await line.complete()).json()
    chunks = events(await line.complete(stream=True))
    assert whole["choices"][0]["text"] == "Hello there."
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello there."


async def test_labels_are_digests_the_narrowest_first_and_never_keys(line: Line) -> None:
    await line.chat(session_id="s-1", user="someone@example.org", prompt_cache_key="k")
    await line.chat(session_id="s-1")
    await line.chat()
    first, second, third = (work.request for work in line.worker.works)
    assert len(set(first.cache.labels)) == 3
    assert second.cache.labels == first.cache.labels[:1]
    assert third.cache.labels == ()
    assert not any("example" in label for label in first.cache.labels)
    assert first.namespace == second.namespace == third.namespace


async def test_c1_3_reuse_of_what_was_decoded_is_asked_for_and_named(line: Line) -> None:
    told = (await line.chat(reuse="decode")).json()["burstline"]
    await line.chat(reuse="exact")
    await line.chat()
    assert [work.request.cache.reuse for work in line.worker.works] == ["decode", "prefill", "prefill"]
    assert (told["reuse"], told["exact"]) == ("exact", True), "it names what was done, not what was asked"


async def test_c1_3_nothing_is_reused_without_the_cache(line: Line) -> None:
    response = await line.chat(reuse="decode", cache=False)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reuse"
    assert not line.worker.works


async def test_every_parameter_is_resolved_before_the_queue(line: Line) -> None:
    await line.chat()
    request = line.worker.works[0].request
    assert request.sampling.temperature == 0.0  # the folder says do_sample: false
    assert 0 <= request.sampling.seed < 1 << 64
    assert request.stop_ids == (0, 2)
    assert request.speculation.k == 3
    assert request.max_tokens == 4096 - len(unpack_tokens(request.prompt))
    assert request.cache.checkpoint_at == len(unpack_tokens(request.prompt)) - len(
        ids("<|im_start|>assistant\n")
    )


@pytest.mark.parametrize(
    ("asked", "resolved"), [(5e-324, 0.0), (9e-7, 0.0), (1e-6, 1e-6), (0, 0.0), (2, 2.0)]
)
async def test_a_temperature_too_small_for_float32_is_greedy(
    line: Line, asked: float, resolved: float
) -> None:
    assert (await line.chat(temperature=asked)).status_code == 200
    assert line.worker.works[0].request.sampling.temperature == resolved


@pytest.mark.parametrize(
    ("asked", "resolved"),
    [
        ({"drafter": "none"}, ("none", 0)),
        ({"drafter": "mtp", "k": 0}, ("none", 0)),
        ({"drafter": "mtp"}, ("mtp", 3)),
        ({"drafter": "ngram", "k": 5}, ("ngram", 5)),
        ({"drafter": "auto"}, ("auto", OPEN_WIDTH)),
        ({"drafter": "block"}, ("block", OPEN_WIDTH)),
        ({"drafter": "block", "k": 4}, ("block", 4)),
    ],
    ids=str,
)
async def test_a_drafter_that_finds_its_own_width_is_not_narrowed(
    line: Line, asked: dict[str, Any], resolved: tuple[str, int]
) -> None:
    assert (await line.chat(speculation=asked)).status_code == 200
    told = line.worker.works[0].request.speculation
    assert (told.drafter, told.k) == resolved


async def test_a_negative_seed_is_taken_as_64_bits(line: Line) -> None:
    await line.chat(seed=-1)
    assert line.worker.works[0].request.sampling.seed == (1 << 64) - 1


@pytest.mark.parametrize(
    ("options", "usage"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
async def test_fr_50_usage_comes_once_in_a_last_chunk_when_asked(
    line: Line, options: dict[str, bool] | None, usage: bool
) -> None:
    fields: dict[str, Any] = {"stream": True} | ({} if options is None else {"stream_options": options})
    chunks = events(await line.chat(**fields))
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    if usage:
        assert with_usage == [chunks[-1]]
        assert chunks[-1]["choices"] == []
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks)


async def test_fr_27_text_ids_and_logprobs_end_together_at_a_stop_string(line: Line) -> None:
    line.worker.script = says("one two three four five", size=4)
    body = (await line.chat(stop=[" three"], logprobs=True, top_logprobs=2, return_token_ids=True)).json()
    choice = body["choices"][0]
    kept = ids("one two")
    assert choice["message"]["content"] == "one two"
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == kept
    texts = [MODEL.vocabulary.token_bytes(token).decode() for token in kept]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == texts
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert body["usage"]["completion_tokens"] == len(ids("one two three"))


async def test_a_stop_string_tells_the_worker_the_offset(line: Line) -> None:
    async def script(work: Work) -> None:
        await work.start()
        for burst in words("one two three", size=1):
            await work.burst(burst)
        await work.cancelled.wait()
        await work.end("cancelled", cancel_reason="stop_string")

    line.worker.script = script
    chunks = events(await line.chat(stop=" two", stream=True))
    assert content(chunks) == "one"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    cancel = line.worker.works[0].cancels[0]
    assert (cancel.reason, cancel.choice, cancel.offset) == ("stop_string", None, len(ids("one two")))
    assert chunks[-1]["burstline"]["worker"] == "w1"


async def test_several_choices_each_have_their_text_and_usage_counts_all(line: Line) -> None:
    whole = (await line.chat(n=3)).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["Hello there."] * 3
    assert whole["usage"]["completion_tokens"] == 3 * (len(ids("Hello there.")) + 1)
    chunks = events(await line.chat(n=3, stream=True))
    assert [content(chunks, index) for index in range(3)] == ["Hello there."] * 3
    assert sum("burstline" in chunk for chunk in chunks) == 1


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]


@pytest.mark.parametrize("size", [1, 4, 100])
async def test_fr_42_every_tool_call_is_whole_with_stable_index_and_id(line: Line, size: int) -> None:
    line.worker.script = says(f"Sure.\n{CALL}\n{CALL}", size=size)
    whole = (await line.chat(tools=TOOLS)).json()
    message = whole["choices"][0]["message"]
    assert message["content"] == "Sure."
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1,  "b": 2}'}
    ] * 2
    chunks = events(await line.chat(tools=TOOLS, stream=True))
    calls = [
        call
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    request_id = line.worker.works[-1].request.request_id
    assert [(call["index"], call["id"]) for call in calls] == [
        (i, call_id(request_id, 0, i)) for i in range(2)
    ]
    assert all(json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2} for call in calls)
    assert content(chunks) == "Sure."


def one_call(work: Work, text: str) -> list[int]:
    """What a worker says of `text` before and with the first last id."""
    said, last = ids(text), work.request.last_ids
    ends = [place for place, token in enumerate(said) if last is not UNSET and token in last]
    return said[: ends[0] + 1] if ends else said


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}])
async def test_without_parallel_calls_the_answer_ends_with_its_first_one(line: Line, choice: Any) -> None:
    async def script(work: Work) -> None:
        await work.start()
        for token in one_call(work, f"Sure.\n{CALL}\n{CALL}"):
            await work.burst([token])
        await work.end("stop", stop_id=None)

    line.worker.script = script
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    whole = (await line.chat(**asked)).json()
    assert [call["function"]["name"] for call in whole["choices"][0]["message"]["tool_calls"]] == ["add"]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["usage"]["completion_tokens"] == len(ids(f"Sure.\n{CALL}"))
    chunks = events(await line.chat(**asked, stream=True, stream_options={"include_usage": True}))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert [len(delta["tool_calls"]) for delta in deltas if "tool_calls" in delta] == [1]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"] == whole["usage"]


async def test_without_parallel_calls_a_broken_one_is_the_end_too_and_stays_text(line: Line) -> None:
    broken = "<tool_call>\n{no\n</tool_call>"

    async def script(work: Work) -> None:
        await work.start()
        await work.burst(one_call(work, f"{broken}\n{CALL}"))
        await work.end("stop", stop_id=None)

    line.worker.script = script
    choice = (await line.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (broken, "stop")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "parallel_tool_calls": True},
        {"tools": TOOLS, "parallel_tool_calls": None},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False},
        {"parallel_tool_calls": False},
    ],
)
async def test_where_calls_are_free_or_not_offered_nothing_new_is_queued(
    line: Line, fields: dict[str, Any]
) -> None:
    assert (await line.chat(**fields)).status_code == 200
    assert line.worker.works[0].request.last_ids is UNSET


async def test_without_tools_a_tool_call_is_text(line: Line) -> None:
    line.worker.script = says(CALL)
    assert (await line.chat()).json()["choices"][0]["message"]["content"] == CALL
    body = (await line.chat(tools=TOOLS, tool_choice="none")).json()
    assert body["choices"][0]["message"]["content"] == CALL


async def test_thinking_is_reasoning_content(line: Line) -> None:
    line.worker.script = says("<think>\nhm\n</think>\n\nYes")
    message = (await line.chat()).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "hm\n"
    assert message["content"] == "Yes"


async def test_fr_51_cached_tokens_are_part_of_the_prompt(line: Line) -> None:
    line.worker.script = says("ok", cached=5)
    usage = (await line.chat()).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5
    line.worker.script = says("ok", cached=10**6)
    usage = (await line.chat()).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]


async def test_fr_48_a_workers_failure_arrives_unchanged(line: Line) -> None:
    failure = Failure(code="engine_fault", message="NaN logits", status=500, retry_after_s=None)

    async def script(work: Work) -> None:
        await work.start()
        await work.burst(ids("Hel"))
        await work.end("error", failure=failure)

    line.worker.script = script
    whole = await line.chat()
    assert whole.status_code == 500
    expected = {"message": "NaN logits", "type": "server_error", "param": None, "code": "engine_fault"}
    assert whole.json() == {"error": expected}
    assert events(await line.chat(stream=True))[-1] == {"error": expected}


async def test_fr_47_a_fault_of_our_own_ends_the_stream_in_band(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret of the implementation")

    monkeypatch.setattr("services.gateway.choice.ChoiceText.take", broken)
    last = events(await line.chat(stream=True))[-1]
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(last)
    whole = await line.chat()
    assert whole.status_code == 500
    assert "secret" not in whole.text


async def test_fr_108_a_request_that_no_worker_takes_is_refused_and_cancelled() -> None:
    async with running_line(queue_deadline_s=0.2, quiet_s=0.05) as line:

        async def deaf(work: Work) -> None:
            await work.cancelled.wait()

        line.worker.script = deaf
        response = await line.chat()
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        await line.gateway.dispatcher.close()
        assert line.worker.works[0].cancels[0].reason == "deadline"


async def test_the_callers_deadline_is_kept(line: Line) -> None:
    async def slow(work: Work) -> None:
        await work.start()
        await work.cancelled.wait()

    line.worker.script = slow
    response = await line.client.post(
        "/v1/completions",
        json={"model": "pocket", "prompt": "x"},
        headers={"x-burstline-deadline-s": "0.2"},
    )
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


async def test_fr_52_comments_keep_a_quiet_stream_alive() -> None:
    async with running_line(keep_alive_s=0.05) as line:

        async def slow(work: Work) -> None:
            await work.start()
            async with line.client.stream("GET", "/healthz"):
                pass
            await work.cancelled.wait()

        line.worker.script = slow
        response = await line.client.post(
            "/v1/chat/completions",
            json={"model": "pocket", "stream": True, "messages": [{"role": "user", "content": "x"}]},
            headers={"x-burstline-deadline-s": "0.5"},
        )
        assert response.status_code == 200
        assert response.text.count(": keep-alive\n\n") >= 3
        assert events(response)[-1]["error"]["code"] == "deadline_exceeded"


async def test_event_ids_name_choice_token_and_sub_event(line: Line) -> None:
    response = await line.chat(stream=True)
    names = [row[4:] for row in response.text.splitlines() if row.startswith("id: ")]
    assert len(set(names)) == len(names)
    parts = [tuple(map(int, name.split("."))) for name in names]
    assert parts == sorted(parts)


async def test_fr_65_a_callers_request_id_is_only_a_label(line: Line) -> None:
    headers = {**HEADERS, "x-request-id": "same"}
    body = {"model": "pocket", "prompt": "x"}
    responses = [await line.client.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
    assert [response.headers["x-request-id"] for response in responses] == ["same", "same"]
    assert len({work.request.request_id for work in line.worker.works}) == 2


async def test_no_live_worker_is_a_503_before_the_queue(line: Line) -> None:
    line.gateway.fleet.note(line.worker.heartbeat(ready=False))
    response = await line.chat()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_worker"
    assert "retry-after" in response.headers
    assert line.worker.works == []


async def test_a_lost_live_frame_is_read_from_the_journal() -> None:
    async with running_line(quiet_s=0.05) as line:

        async def script(work: Work) -> None:
            line.server.deliver, deliver = (lambda _: None), line.server.deliver  # type: ignore[method-assign]
            try:
                await says("Nobody heard this.")(work)
            finally:
                line.server.deliver = deliver  # type: ignore[method-assign]

        line.worker.script = script
        assert (await line.chat()).json()["choices"][0]["message"]["content"] == "Nobody heard this."


async def test_a_stream_that_contradicts_itself_ends_in_an_error(line: Line) -> None:
    async def script(work: Work) -> None:
        await work.start()
        await work.burst(ids("Hello"))
        work.emitted = [0]
        await work.burst(ids("Other"))
        await work.cancelled.wait()

    line.worker.script = script
    chunks = events(await line.chat(stream=True))
    assert content(chunks[:-1]) == "Hello"
    assert chunks[-1]["error"]["code"] == "protocol_error"
    await line.gateway.dispatcher.close()
    assert line.worker.works[0].cancels[0].reason == "operator"


async def test_a_second_attempt_continues_the_stream(line: Line) -> None:
    async def script(work: Work) -> None:
        await work.start()
        await work.burst(ids("Hello"))
        work.attempt = 2
        await work.start()
        await work.burst(ids(" there"))
        await work.end()

    line.worker.script = script
    assert content(events(await line.chat(stream=True))) == "Hello there"


async def test_streams_that_outlast_the_drain_end_in_band(line: Line) -> None:
    line.worker.script = until_cancelled
    stream = asyncio.create_task(line.chat(stream=True))
    await line.work()
    await line.gateway.dispatcher.abort()
    assert events(await stream)[-1]["error"]["code"] == "shutting_down"


async def test_a_request_of_a_silent_worker_is_enqueued_once() -> None:
    """What a worker leaves on its subject the others pull; a copy could run twice."""
    async with running_line(worker_silence_s=0.3, quiet_s=0.1) as line:
        line.broker.entry = EntryRef(key=b"k" * 32, position=64, workers=("gone",))
        line.gateway.fleet.note(line.worker.heartbeat(worker_id="gone"))  # its only heartbeat

        async def beat() -> None:
            while True:
                line.gateway.fleet.note(line.worker.heartbeat())
                await asyncio.sleep(0.05)

        beating = asyncio.create_task(beat())
        try:
            body = (await line.complete(prompt="A prompt of more than one block. " * 20)).json()
        finally:
            beating.cancel()
        assert body["choices"][0]["text"] == "Hello there."
        assert body["burstline"]["route"] == "affinity"
        assert line.worker.works[0].message.subject.startswith(subjects.own_queue(FINGERPRINT, "gone"))
        assert len(line.worker.works) == 1
