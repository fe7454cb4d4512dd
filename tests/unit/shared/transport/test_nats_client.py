"""A publish as it goes over the wire: as nats-py would write it, whichever way it takes. And the wait for a PONG."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.client import Client
from nats.errors import FlushTimeoutError

from shared.transport.nats_client import PatientClient, message


@pytest.mark.parametrize("reply", ["", "_INBOX.1"])
@pytest.mark.parametrize(
    "headers", [{"Trace-Parent": "00-1", "Tenant": "ä 한국어"}, {"a": ""}, {"a": "b c", "d-E-1": "0"}, None]
)
async def test_a_publish_is_written_as_nats_py_writes_it(headers: dict[str, str] | None, reply: str) -> None:
    theirs = Client()
    await theirs._send_publish("a.b", reply, b"data\r\n", 6, headers)
    assert message("a.b", b"data\r\n", reply, headers) == b"".join(theirs._pending)


@pytest.mark.parametrize(
    ("subject", "reply", "headers"),
    [
        ("", "", None),
        ("a b", "", None),
        ("a\r\nPUB b 0", "", None),
        ("a", "b c", None),
        ("a", "b\n", None),
        ("a", "", {"a": " spaces around "}),
        ("a", "", {"a": "two\r\nlines"}),
        ("a", "", {"a_b.c": "a name that is no word"}),
        ("a", "", {"a\r\nb": "c"}),
        ("a", "", {"": "c"}),
    ],
)
def test_what_could_be_taken_for_another_message_is_left_to_nats_py(
    subject: str, reply: str, headers: dict[str, str] | None
) -> None:
    assert message(subject, b"", reply, headers) is None


def test_without_a_connection_nothing_is_posted() -> None:
    client = PatientClient()
    assert not client.post("a", b"", "", None)
    assert not client._pending


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
