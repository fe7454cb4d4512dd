"""A publish as it goes over the wire: as nats-py would write it, whichever way it takes. And the wait for a PONG."""

from __future__ import annotations

import asyncio

import pytest
from nats import errors as nats_errors
from nats.aio.client import Client
from nats.errors import FlushTimeoutError

from shared.transport.nats_client import PatientClient


@pytest.mark.parametrize(
    "headers",
    [
        {"Trace-Parent": "00-1", "Tenant": "ä 한국어"},
        {"a": " spaces around "},
        {"a": "two\r\nlines"},
        {"a_b.c": "a name that is no word"},
        {},
        None,
    ],
)
async def test_headers_are_written_as_nats_py_writes_them(headers: dict[str, str] | None) -> None:
    ours, theirs = PatientClient(), Client()
    for client in (ours, theirs):
        await client._send_publish("a.b", "_INBOX.1", b"data", 4, headers)
    assert b"".join(ours._pending) == b"".join(theirs._pending)
    assert ours.stats == theirs.stats


async def test_a_name_that_would_break_the_block_is_refused() -> None:
    with pytest.raises(nats_errors.BadHeaderError):
        await PatientClient()._send_publish("a.b", "", b"", 0, {"a\r\nb": "c"})


async def test_a_cancellation_that_comes_with_the_pong_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    client = PatientClient()
    pinged: list[asyncio.Future[bool]] = []

    async def ping(pong: asyncio.Future[bool]) -> None:
        pinged.append(pong)

    monkeypatch.setattr(client, "_send_ping", ping)
    flush = asyncio.create_task(client.flush(5))
    await asyncio.sleep(0)
    pinged[0].set_result(True)
    flush.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flush


async def test_a_ping_without_a_pong_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    client = PatientClient()

    async def ping(pong: asyncio.Future[bool]) -> None:
        pass

    monkeypatch.setattr(client, "_send_ping", ping)
    with pytest.raises(FlushTimeoutError):
        await client.flush(0.01)
