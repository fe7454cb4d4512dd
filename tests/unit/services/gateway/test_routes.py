"""Models, limits, probes, figures, traces."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from opentelemetry.trace import format_span_id, format_trace_id

from shared.protocol import subjects
from shared.protocol.messages import EntryRef
from tests.unit.services.gateway.line import FINGERPRINT, Line


async def test_models_are_listed_with_their_window(line: Line) -> None:
    card = (await line.client.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["object"], card["ready"], card["max_model_len"]) == (
        "pocket",
        "model",
        True,
        4096,
    )
    assert (await line.client.get("/v1/models/pocket")).json() == card


async def test_models_need_a_key(line: Line) -> None:
    response = await line.client.get("/v1/models", headers={"authorization": ""})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"


async def test_fr_56_limits_are_published(line: Line) -> None:
    limits = (await line.client.get("/v1/limits")).json()
    assert limits["max_choices"] == 8
    assert limits["max_body_bytes"] == line.gateway.settings.max_body_bytes


async def test_fr_123_readiness_says_why_not(line: Line) -> None:
    assert (await line.client.get("/readyz")).json() == {"status": "ready", "reasons": {}}
    line.gateway.fleet.note(line.worker.heartbeat(ready=False))
    response = await line.client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["reasons"] == {"workers": "no live worker for model pocket"}
    line.server.online = False
    assert "nats" in (await line.client.get("/readyz")).json()["reasons"]
    assert (await line.client.get("/healthz")).status_code == 200


async def test_fr_101_a_queue_that_takes_nothing_refuses_typed_is_unready_and_heals(line: Line) -> None:
    stored = line.server.streams[subjects.REQUESTS.name]
    size = stored.spec.max_bytes
    stored.update(replace(stored.spec, max_bytes=1))
    refused = await line.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert int(refused.headers["retry-after"]) > 0
    unready = await line.client.get("/readyz")
    assert unready.json()["reasons"] == {"queue": "the queue takes nothing (overloaded)"}
    stored.update(replace(stored.spec, max_bytes=size))
    assert (await line.chat()).status_code == 200
    assert (await line.client.get("/readyz")).status_code == 200


async def test_workers_with_another_vocabulary_are_not_used(line: Line) -> None:
    """Another model folder under the same name on one side: the answer would be other text, silently."""
    line.gateway.fleet.note(line.worker.heartbeat(vocabulary_size=512))
    response = await line.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "model_mismatch")
    assert "512 ids" in (await line.client.get("/readyz")).json()["reasons"]["workers"]
    assert line.worker.works == []


async def test_fr_124_draining_fails_readiness_first(line: Line) -> None:
    line.gateway.draining = True
    assert (await line.client.get("/readyz")).json()["reasons"]["drain"] == "draining"
    assert (await line.chat()).status_code == 200


async def test_metrics_count_requests_and_tokens(line: Line) -> None:
    await line.chat()
    await line.chat(model="none")
    text = (await line.client.get("/metrics")).text
    assert 'burstline_gateway_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'burstline_gateway_requests_total{route="/v1/chat/completions",status="404"} 1.0' in text
    assert 'burstline_gateway_tokens_total{kind="completion",model="pocket"}' in text
    assert "burstline_gateway_in_flight 0.0" in text


async def test_labels_of_unknown_paths_are_bounded(line: Line) -> None:
    for place in range(5):
        await line.client.get(f"/nowhere/{place}")
    text = (await line.client.get("/metrics")).text
    assert 'route="other",status="404"} 5.0' in text
    assert "/nowhere" not in text


async def test_one_trace_goes_through_auth_render_lookup_enqueue_and_stream(line: Line) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    response = await line.client.post(
        "/v1/completions", json={"model": "pocket", "prompt": "x " * 200}, headers={"traceparent": parent}
    )
    assert response.headers["x-trace-id"] == "0af7651916cd43dd8448eb211c80319c"
    spans = {span.name: span for span in line.spans.get_finished_spans()}
    root = spans["POST /v1/completions"]
    for name in ("auth", "render", "lookup", "enqueue", "stream"):
        assert spans[name].parent is not None
        assert spans[name].parent.span_id == root.context.span_id
    work = line.worker.works[0]
    expected = f"00-{format_trace_id(root.context.trace_id)}-{format_span_id(root.context.span_id)}-01"
    assert work.message.headers["traceparent"] == expected
    assert work.message.headers["burstline-tenant"] == "acme"


async def test_fr_121_an_unsampled_trace_stays_unsampled_over_the_queue(line: Line) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    await line.client.post(
        "/v1/completions", json={"model": "pocket", "prompt": "x"}, headers={"traceparent": parent}
    )
    assert line.worker.works[0].message.headers["traceparent"].endswith("-00")
    assert line.spans.get_finished_spans() == ()


async def test_a_request_goes_to_the_worker_that_holds_its_entry(line: Line) -> None:
    line.broker.entry = EntryRef(key=b"k" * 32, position=64, workers=("w1",))
    long = "A prompt of more than one block. " * 20
    body = (await line.complete(prompt=long)).json()
    assert body["burstline"]["route"] == "affinity"
    assert line.worker.works[0].message.subject.startswith(subjects.own_queue(FINGERPRINT, "w1"))


async def test_c3_a_lookup_that_is_late_is_a_miss(line: Line) -> None:
    await line.chat()
    line.broker.delay_s = 30
    long = "A prompt of more than one block. " * 20
    async with asyncio.timeout(10):
        body = (await line.complete(prompt=long)).json()
    assert body["choices"][0]["text"] == "Hello there."
    assert body["burstline"]["route"] == "lookup_unavailable"


async def test_cache_false_asks_for_no_entry(line: Line) -> None:
    await line.complete(prompt="A prompt of more than one block. " * 20, cache=False)
    assert line.worker.works[0].request.cache.enabled is False
    assert [type(call).__name__ for call in line.broker.calls] == ["Authenticate"]
