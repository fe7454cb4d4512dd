"""The probes over real HTTP on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from shared import health
from shared.asgi import bind, serve
from shared.errors import Unavailable


async def well() -> str | None:
    return None


async def ill() -> str | None:
    return "NATS is away"


async def broken() -> str | None:
    raise KeyError("secret")


async def hanging() -> str | None:
    await asyncio.Event().wait()
    return None


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    registry = CollectorRegistry()
    Counter("burstline_things", "Things.", registry=registry).inc()
    async with (
        health.serve_health(0, {"a": well}, registry) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as opened,
    ):
        yield opened


async def test_probes(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz")).json() == {"status": "ok"}
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "reasons": {}})
    assert "burstline_things_total 1.0" in (await client.get("/metrics")).text
    assert (await client.get("/nothing")).status_code == 404
    assert (await client.post("/healthz")).status_code == 405
    head = await client.head("/readyz")
    assert (head.status_code, head.content) == (200, b"")


async def test_fr_101_unready_tells_every_reason_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_S", 0.05)
    checks = {"well": well, "ill": ill, "broken": broken, "hanging": hanging}
    async with (
        health.serve_health(0, checks, CollectorRegistry()) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as opened,
    ):
        answer = await opened.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == {
        "ill": "NATS is away",
        "broken": "KeyError",
        "hanging": "no answer within 0.05 s",
    }


async def test_a_taken_port_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=str(port)):
            async with health.serve_health(port, {}, CollectorRegistry()):
                pass


async def test_an_application_that_does_not_start_is_told() -> None:
    async def app(scope: dict[str, object], receive: object, send: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(Unavailable):
        async with serve(app, lifespan="on"):
            pass
