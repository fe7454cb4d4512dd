"""Headers as they come from the server, and a listener that fails."""

from __future__ import annotations

import asyncio

import pytest
from nats.errors import FlushTimeoutError

from shared.transport.nats_client import PatientClient, parse_headers
from shared.transport.wire import Raw


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (None, {}),
        (b"", {}),
        (b"NATS/1.0\r\n\r\n", {}),
        (b"NATS/1.0\r\na: b\r\nTrace: 00-1: x\r\n\r\n", {"a": "b", "Trace": "00-1: x"}),
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503"}),
        (b"NATS/1.0 404 No Messages\r\n\r\n", {"Status": "404", "Description": "No Messages"}),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Stream: 12\r\n\r\n",
            {"Status": "100", "Description": "Idle Heartbeat", "Nats-Last-Stream": "12"},
        ),
        ("NATS/1.0\r\nä:é\r\nno field\r\n\r\n".encode(), {"ä": "é"}),
        (b"NATS/1.0\r\na: \xff\r\n\r\n", {"a": "\ufffd"}),
    ],
)
def test_header_blocks(block: bytes | None, expected: dict[str, str]) -> None:
    assert parse_headers(block) == expected


async def test_a_listener_that_fails_is_told_and_the_next_message_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, heard = PatientClient(), []

    def receive(raw: Raw) -> None:
        heard.append(raw.data)
        if len(heard) == 1:
            raise ValueError("first")

    client._receivers[7] = receive
    for data in (b"1", b"2"):
        await client._process_msg(7, b"a.b", b"", data, b"")
    assert heard == [b"1", b"2"]
    assert [record.message for record in caplog.records] == ["a listener on a failed"]


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
