"""Reports of other servers, tried at this gateway: streams that end without a word, prompts of a megabyte, ids that clients
choose, drains and outages in the middle of many streams."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from services.gateway.app import create_app
from services.gateway.config import GatewaySettings
from services.gateway.service import Gateway
from shared.protocol import codec
from shared.protocol.messages import ClaimCheck, unpack_tokens
from shared.telemetry import build
from shared.transport import bodies
from shared.transport.base import Delivery
from shared.transport.memory import MemoryTransport
from shared.transport.wire import message_bytes
from tests.unit.services.gateway.line import HEADERS, MODEL, Line, Work, ids, running_line, says
from tests.unit.services.gateway.test_generate import CALL, TOOLS, content, events
from tests.waiting import until

TEXT = "One two three four five six."


@asynccontextmanager
async def _another(line: Line) -> AsyncIterator[httpx.AsyncClient]:
    """A caller of a second gateway on the same queue."""
    telemetry = build("gateway", None)
    settings = GatewaySettings(no_worker_grace_s=0)
    gateway = Gateway(settings, MemoryTransport(line.server), telemetry, {"pocket": MODEL})
    transport = httpx.ASGITransport(create_app(gateway), raise_app_exceptions=False)
    async with (
        gateway.running(),
        httpx.AsyncClient(
            transport=transport, base_url="http://other", headers=HEADERS, timeout=30
        ) as client,
    ):
        gateway.fleet.note(line.worker.heartbeat())
        yield client
    telemetry.shutdown()


@pytest.mark.parametrize("kind", ["text", "ids"])
async def test_fr_94_a_prompt_of_a_megabyte_is_refused_at_once_by_its_length(line: Line, kind: str) -> None:
    prompt: object = "word " * 250_000 if kind == "text" else [7] * 300_000
    response = await line.complete(prompt=prompt)
    assert response.status_code in (400, 413)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert line.worker.works == []


async def test_fr_94_a_request_beyond_one_message_goes_by_claim_check(line: Line) -> None:
    """What limits a prompt is the model's window, never the size of a message: it is stored in parts and comes back whole."""
    line.server.max_payload_bytes = 8192
    packed: list[ClaimCheck] = []

    async def serve(delivery: Delivery) -> None:
        check = codec.decode_as(ClaimCheck, delivery.message.data)
        packed.append(check)
        assert message_bytes(delivery.message.data, delivery.message.headers) <= 8192
        whole = codec.encode(await bodies.redeem(line.worker.transport, check))
        work = Work(line.worker, SimpleNamespace(message=SimpleNamespace(data=whole)))  # type: ignore[arg-type]
        line.worker.works.append(work)
        await says(TEXT)(work)
        await delivery.ack()

    line.worker._serve = serve  # type: ignore[method-assign]
    prompt = [3 + place % 2000 for place in range(3500)]
    answer = await line.complete(prompt=prompt, max_tokens=40)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == TEXT
    assert len(packed) == 1
    assert list(unpack_tokens(line.worker.works[0].request.prompt)) == prompt


async def test_fr_65_one_request_id_at_two_gateways_at_once_is_two_requests(line: Line) -> None:
    together = asyncio.Event()

    async def script(work: Work) -> None:
        if len(line.worker.works) == 2:
            together.set()
        await together.wait()
        await says(work.request.request_id)(work)

    line.worker.script = script
    headers = HEADERS | {"x-request-id": "same"}
    async with _another(line) as other:
        answers = await asyncio.gather(
            *(
                client.post("/v1/completions", json={"model": "pocket", "prompt": "x"}, headers=headers)
                for client in (line.client, other)
            )
        )
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [answer.headers["x-burstline-request-id"] for answer in answers]
    assert len(set(texts)) == 2
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}


@pytest.mark.parametrize(
    "where",
    [
        "services.gateway.detokenize.Detokenizer.texts",
        "services.gateway.parsers.assistant.AssistantParser.text",
    ],
)
async def test_fr_47_fr_44_a_drop_in_mid_stream_is_told_in_band_in_one_line_and_one_event(
    line: Line, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The detokeniser, or the tool parser, breaks after some tokens."""
    module, name, method = where.rsplit(".", 2)
    plain, calls = getattr(getattr(importlib.import_module(module), name), method), []

    def broken(*args: Any, **fields: Any) -> Any:
        calls.append(args)
        if len(calls) > 2:
            raise ZeroDivisionError("a secret of the implementation")
        return plain(*args, **fields)

    monkeypatch.setattr(where, broken)
    line.worker.script = says(f"Sure, I shall do that.\n{CALL}", size=2)
    chunks = events(await line.chat(stream=True, tools=TOOLS))
    assert "".join(content(chunks[:-1]))
    assert chunks[-1]["error"]["code"] == "internal_error"
    assert len([record for record in caplog.records if "was cut" in record.message]) == 1
    told = [event for span in line.spans.get_finished_spans() for event in span.events if event.name == "cut"]
    assert len(told) == 1
    await line.gateway.dispatcher.close()
    assert [cancel.reason for cancel in line.worker.works[0].cancels] == ["operator"]


@pytest.mark.parametrize("size", [4, 5, 8, 1000])
async def test_fr_42_fr_44_a_burst_over_the_end_of_a_call_loses_neither_it_nor_what_follows(
    line: Line, size: int
) -> None:
    """One burst closes a call and opens the next one, another one closes that and goes on in words."""
    line.worker.script = says(f"{CALL}\n{CALL}\nThat was all.", size=size)
    chunks = events(await line.chat(stream=True, tools=TOOLS))
    arguments: dict[int, str] = {}
    names: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls", []):
                place, function = call["index"], call["function"]
                names[place] = names.get(place, "") + function.get("name", "")
                arguments[place] = arguments.get(place, "") + function.get("arguments", "")
    assert names == {0: "add", 1: "add"}
    assert [json.loads(text) for text in arguments.values()] == [{"a": 1, "b": 2}] * 2
    assert "That was all." in content(chunks)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["tool_calls"]


async def test_fr_105_a_queue_that_is_away_in_mid_stream_costs_the_caller_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is down while tokens are told, nobody hears those that come next live, and then it is back."""
    failed, check = [], MemoryTransport._check

    def counted(transport: MemoryTransport) -> None:
        if not transport.server.online:
            failed.append(transport)
        check(transport)

    monkeypatch.setattr(MemoryTransport, "_check", counted)
    async with running_line(quiet_s=0.02) as line:
        tokens = ids(TEXT)

        async def script(work: Work) -> None:
            await work.start()
            await work.burst(tokens[:2])
            line.server.online = False
            await until(lambda: len(failed) > 3)  # looks of the reader into a journal that is away
            line.server.online = True
            line.server.deliver, deliver = (lambda _: None), line.server.deliver  # type: ignore[method-assign]
            await work.burst(tokens[2:5])
            line.server.deliver = deliver  # type: ignore[method-assign]
            await work.burst(tokens[5:])
            await work.end()

        line.worker.script = script
        chunks = events(await line.chat(stream=True))
        assert content(chunks) == TEXT
        assert len(line.worker.works) == 1


async def test_fr_124_twenty_streams_end_whole_at_a_gateway_that_drains(line: Line) -> None:
    """Readiness fails first, then what runs is told to its end."""
    go = asyncio.Event()

    async def script(work: Work) -> None:
        await work.start()
        await work.burst(ids(TEXT)[:2])
        await go.wait()
        await work.burst(ids(TEXT)[2:])
        await work.end()

    line.worker.script = script
    streams = [asyncio.create_task(line.chat(stream=True)) for _ in range(20)]
    await until(lambda: len(line.worker.works) == 20)
    line.gateway.draining = True
    assert (await line.client.get("/readyz")).status_code == 503
    go.set()
    for answer in await asyncio.gather(*streams):
        assert content(events(answer)) == TEXT
    assert all(work.cancels == [] for work in line.worker.works)


async def test_fr_116_fifty_open_streams_leave_probes_and_newcomers_alone(line: Line) -> None:
    """A stream holds its subscription and nothing else: no call to the broker is under way."""
    go = asyncio.Event()

    async def script(work: Work) -> None:
        await work.start()
        if len(line.worker.works) <= 50:
            await go.wait()
        await says(TEXT)(work)

    line.worker.script = script
    streams = [asyncio.create_task(line.chat(stream=True)) for _ in range(50)]
    await until(lambda: len(line.worker.works) == 50)
    asked = len(line.broker.calls)
    assert (await line.client.get("/readyz")).status_code == 200
    assert (await line.chat()).json()["choices"][0]["message"]["content"] == TEXT
    assert len(line.broker.calls) - asked <= 1, "a key that is known, and one lookup at most"
    go.set()
    assert all(content(events(answer)) == TEXT for answer in await asyncio.gather(*streams))
