"""Callers who come back: Idempotency-Key and Last-Event-ID."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from shared.errors import Overloaded
from shared.protocol import codec
from shared.protocol.messages import AnswerSheet, Failure
from tests.unit.services.gateway.line import (
    HEADERS,
    OTHER_KEY,
    Line,
    Work,
    ids,
    running_line,
    says,
    until_cancelled,
    words,
)
from tests.unit.services.gateway.test_disconnect import Caller
from tests.waiting import until

CHAT = "/v1/chat/completions"
TEXT = "Hello there, how are you today?"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}]} | fields


async def post(
    line: Line, *, key: str | None = "k", after: str | None = None, **fields: Any
) -> httpx.Response:
    headers = {} if key is None else {"idempotency-key": key}
    if after is not None:
        headers["last-event-id"] = after
    return await line.client.post(CHAT, json=body(**fields), headers=headers)


def told(response: httpx.Response) -> list[tuple[str | None, Any]]:
    """(id, data) of every event, the end mark too."""
    assert response.status_code == 200, response.text
    found: list[tuple[str | None, Any]] = []
    for block in response.text.split("\n\n"):
        lines = dict(row.split(": ", 1) for row in block.splitlines() if not row.startswith(":"))
        if "data" in lines:
            data = lines["data"]
            found.append((lines.get("id"), data if data == "[DONE]" else json.loads(data)))
    return found


def text_of(events: list[tuple[str | None, Any]]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for _, data in events
        if data != "[DONE]"
        for choice in data["choices"]
    )


def same(first: Any, second: Any) -> None:
    """Everything of an answer but the trace that told it."""
    for answer in (first, second):
        answer["burstline"].pop("trace_id")
    assert first == second


async def test_fr_68_a_finished_request_is_replayed_and_not_run_again(line: Line) -> None:
    line.worker.script = says(TEXT)
    first = await post(line)
    again = await post(line)
    assert len(line.worker.works) == 1
    same(first.json(), again.json())
    ours = "x-burstline-request-id"
    assert first.headers[ours] == again.headers[ours] == line.worker.works[0].request.request_id
    streamed = told(await post(line, stream=True, stream_options={"include_usage": True}))
    assert text_of(streamed) == TEXT
    assert streamed[-2][1]["usage"] == first.json()["usage"]
    assert len(line.worker.works) == 1


async def test_fr_68_a_running_request_is_attached_to(line: Line) -> None:
    go = asyncio.Event()

    async def script(work: Work) -> None:
        await work.start()
        await work.burst(ids("Hello"))
        await go.wait()
        await work.burst(ids(" there"))
        await work.end()

    line.worker.script = script
    caller = Caller(line, CHAT, body(stream=True), key="k")
    async with asyncio.timeout(10):
        await caller.got.wait()
    others = [asyncio.create_task(post(line)), asyncio.create_task(post(line, stream=True))]
    await until(lambda: _readers(line, 3))
    go.set()
    whole, stream = await asyncio.gather(*others)
    assert whole.json()["choices"][0]["message"]["content"] == "Hello there"
    assert text_of(told(stream)) == "Hello there"
    await caller.task
    assert len(line.worker.works) == 1
    assert line.worker.works[0].cancels == []


async def _readers(line: Line, count: int) -> bool:
    return len([one for one in line.server.listeners if one.pattern.startswith("tok.")]) == count


async def test_fr_68_two_at_once_run_once(line: Line) -> None:
    answers = await asyncio.gather(*(post(line) for _ in range(5)))
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(line.worker.works) == 1


async def test_fr_68_another_body_is_a_409_and_another_tenant_has_its_own_keys(line: Line) -> None:
    await post(line)
    refused = await post(line, temperature=0.5)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "idempotency_key_reused"
    other = await line.client.post(
        CHAT, json=body(), headers={"idempotency-key": "k", "authorization": f"Bearer {OTHER_KEY}"}
    )
    assert other.status_code == 200
    assert len(line.worker.works) == 2


async def test_a_broker_that_is_away_refuses_keys_and_nothing_else(line: Line) -> None:
    await post(line, key=None)
    line.broker.failure = Failure(code="x", message="x", status=503, retry_after_s=None)
    assert (await post(line)).status_code == 503
    assert len(line.worker.works) == 1
    assert (await post(line, key=None)).status_code == 200


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\xe9"])
async def test_a_key_is_printable_and_short(line: Line, key: str) -> None:
    refused = await line.client.post(CHAT, json=body(), headers={b"idempotency-key": key.encode("latin-1")})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize("choices", [1, 2])
async def test_after_every_event_a_stream_goes_on_without_gap_or_repeat(line: Line, choices: int) -> None:
    line.worker.script = says(TEXT, size=2)
    options: dict[str, Any] = {"stream": True, "n": choices, "stream_options": {"include_usage": True}}
    whole = told(await post(line, **options))
    named = [place for place, (name, _) in enumerate(whole) if name is not None]
    assert len({whole[place][0] for place in named}) == len(named)
    request = line.worker.works[0].request.request_id
    for place in (*named[:: max(1, len(named) // 6)], named[-1]):
        after = str(whole[place][0])
        rest = told(await post(line, after=after, **options))
        assert [name for name, _ in rest] == [name for name, _ in whole[place + 1 :]]
        assert text_of(rest) == text_of(whole[place + 1 :])
        got = await line.client.get(f"/v1/streams/{request}", headers={"last-event-id": after})
        assert [name for name, _ in told(got)] == [name for name, _ in rest]
    assert len(line.worker.works) == 1


async def test_a_stream_is_its_tenants_alone(line: Line) -> None:
    await post(line, stream=True)
    request = line.worker.works[0].request.request_id
    assert text_of(told(await line.client.get(f"/v1/streams/{request}"))) == "Hello there."
    other = {"authorization": f"Bearer {OTHER_KEY}"}
    for path, headers in ((request, other), ("0" * 32, HEADERS), ("%00", HEADERS)):
        assert (await line.client.get(f"/v1/streams/{path}", headers=headers)).status_code == 404


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"after": "x", "stream": True}, 400),
        ({"after": "0.1.0", "stream": True, "key": None}, 400),
        ({"after": "0.1.0"}, 400),
        ({"after": "0.1.0", "stream": True}, 404),
    ],
)
async def test_a_last_event_id_that_cannot_be_meant_is_refused(
    line: Line, fields: dict[str, Any], status: int
) -> None:
    assert (await post(line, **fields)).status_code == status
    assert line.worker.works == []


async def test_a_stop_string_is_replayed_without_a_second_cancellation(line: Line) -> None:
    async def script(work: Work) -> None:
        await work.start()
        for burst in words("one STOP two", size=2):
            await work.burst(burst)
        await work.cancelled.wait()
        await work.end("stop", cancel_reason="stop_string")

    line.worker.script = script
    first = await post(line, stop="STOP")
    same(first.json(), (await post(line, stop="STOP")).json())
    await line.gateway.dispatcher.close()
    assert len(line.worker.works[0].cancels) == 1


async def test_a_caller_with_a_key_that_does_not_come_back_is_cancelled_after_a_while() -> None:
    async with running_line(linger_s=0.3) as line:
        line.worker.script = until_cancelled
        caller = Caller(line, CHAT, body(stream=True), key="k")
        async with asyncio.timeout(10):
            await caller.got.wait()
        await caller.leave()
        work = line.worker.works[0]
        assert work.cancels == []
        async with asyncio.timeout(10):
            await work.cancelled.wait()
        assert work.cancels[0].reason == "client_disconnected"


async def test_a_caller_that_came_back_is_not_cancelled() -> None:
    async with running_line(linger_s=0.2) as line:
        go = asyncio.Event()

        async def script(work: Work) -> None:
            await work.start()
            await work.burst(ids("Hello"))
            await go.wait()
            await work.end()

        line.worker.script = script
        caller = Caller(line, CHAT, body(stream=True), key="k")
        async with asyncio.timeout(10):
            await caller.got.wait()
        await caller.leave()
        back = asyncio.create_task(post(line, stream=True))
        await until(lambda: _readers(line, 1))
        await until(lambda: _nobody_lingers(line))
        go.set()
        assert text_of(told(await back)) == "Hello"
        assert line.worker.works[0].cancels == []


async def _nobody_lingers(line: Line) -> bool:
    return not any(task.get_name().startswith("linger") for task in asyncio.all_tasks())


async def test_a_queue_that_is_full_frees_the_key(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise Overloaded("the queue is full")

    with monkeypatch.context() as patch:
        patch.setattr(line.gateway.dispatcher, "enqueue", full)
        assert (await post(line)).status_code == 503
    assert line.broker.bound == {}
    assert (await post(line)).status_code == 200


async def test_a_request_that_no_worker_took_frees_its_key_once_it_is_cancelled() -> None:
    async with running_line(queue_deadline_s=0.2, quiet_s=0.05) as line:

        async def deaf(work: Work) -> None:
            await work.cancelled.wait()

        line.worker.script = deaf
        assert (await post(line)).status_code == 503
        await line.gateway.dispatcher.close()
        assert line.worker.works[0].cancels[0].reason == "deadline"
        assert line.broker.bound == {}


async def test_fr_124_a_gateway_that_ends_leaves_a_request_with_a_key_to_others(line: Line) -> None:
    line.worker.script = until_cancelled
    keyed, plain = (Caller(line, CHAT, body(stream=True), key=key) for key in ("k", None))
    async with asyncio.timeout(10):
        await asyncio.gather(keyed.got.wait(), plain.got.wait())
    await line.gateway.dispatcher.abort()
    async with asyncio.timeout(10):
        await asyncio.gather(keyed.task, plain.task)
    assert all(
        b"shutting_down" in b"".join(one.get("body", b"") for one in caller.sent) for caller in (keyed, plain)
    )
    await line.gateway.dispatcher.close()
    (bound,) = line.broker.bound.values()
    assert {work.request.request_id == bound.request_id: len(work.cancels) for work in line.worker.works} == {
        True: 0,
        False: 1,
    }


async def test_what_is_kept_of_a_request_has_no_prompt(line: Line) -> None:
    await post(line, cache_salt="pepper", session_id="mine")
    (bound,) = line.broker.bound.values()
    sheet = codec.decode_as(AnswerSheet, bound.sheet)
    assert (sheet.request.prompt, sheet.request.namespace.salt, sheet.request.cache.labels) == (b"", "", ())
    assert sheet.prompt_tokens == len(line.worker.works[0].request.prompt) // 4
