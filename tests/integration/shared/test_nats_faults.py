"""The NATS transport when its server goes away, comes back, says no, or is not there."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client

from services.embedded.nats import NatsServer
from shared.errors import Unavailable
from shared.protocol.subjects import (
    JOURNAL,
    REQUESTS,
    STREAMS,
    ConsumerSpec,
    request_shared,
    tokens,
    work_consumer,
)
from shared.transport.base import Transport
from shared.transport.nats import connect
from tests.waiting import until

FINGERPRINT = "f" * 64
SUBJECT = request_shared(FINGERPRINT, "normal", "tenant")
PATIENCE_S = 60.0


@pytest.fixture
async def transport(nats_server: NatsServer) -> AsyncIterator[Transport]:
    opened = await connect(nats_server.url, name="faults")
    for spec in STREAMS:
        await opened.ensure_stream(spec)
    yield opened
    await opened.close()


def normal_consumer() -> ConsumerSpec:
    return work_consumer(SUBJECT, ack_wait_s=30.0)


async def restart(server: NatsServer) -> None:
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)


async def until_ready(transport: Transport) -> None:
    """Readiness is a round trip: there is no event for it."""
    await until(transport.ready, within_s=PATIENCE_S)


async def until_away(transport: Transport) -> None:
    """The other way round."""

    async def away() -> bool:
        return not await transport.ready()

    await until(away, within_s=PATIENCE_S)


@pytest.mark.parametrize("limit", [1, 8])
async def test_fr_102_a_waiting_fetch_survives_a_restart(
    transport: Transport, nats_server: NatsServer, limit: int
) -> None:
    consumer = await transport.ensure_consumer(normal_consumer())
    waiting = asyncio.create_task(consumer.fetch(limit=limit, timeout=PATIENCE_S))
    await asyncio.sleep(0.1)  # it lingers at the old server
    await restart(nats_server)
    await until_ready(transport)
    await transport.append(SUBJECT, b"after")
    deliveries = await waiting
    assert [one.message.data for one in deliveries] == [b"after"]
    await deliveries[0].ack()
    assert await consumer.pending() == 0


async def test_fr_102_an_idle_consumer_and_a_delivery_survive_a_restart(
    transport: Transport, nats_server: NatsServer
) -> None:
    consumer = await transport.ensure_consumer(normal_consumer())
    await transport.append(SUBJECT, b"one")
    await transport.append(SUBJECT, b"two")
    (held,) = await consumer.fetch(limit=1, timeout=PATIENCE_S)
    await restart(nats_server)
    await until_ready(transport)
    await held.progress()
    await held.ack()
    (second,) = await consumer.fetch(limit=4, timeout=PATIENCE_S)
    assert second.message.data == b"two"
    await second.ack()


async def test_fr_102_a_lost_consumer_is_made_again(transport: Transport, nats_server: NatsServer) -> None:
    consumer = await transport.ensure_consumer(normal_consumer())
    admin = await connect(nats_server.url, name="admin")
    await admin.request(
        f"$JS.API.CONSUMER.DELETE.{REQUESTS.name}.{normal_consumer().durable}", b"", timeout=PATIENCE_S
    )
    await admin.append(SUBJECT, b"x")
    (delivery,) = await consumer.fetch(limit=1, timeout=PATIENCE_S)
    await delivery.ack()
    await admin.close()


async def test_fetch_while_the_server_is_away_returns_nothing(
    transport: Transport, nats_server: NatsServer
) -> None:
    consumer = await transport.ensure_consumer(normal_consumer())
    await asyncio.to_thread(nats_server.stop)
    assert await consumer.fetch(limit=4, timeout=0.5) == []
    assert not await transport.ready()
    with pytest.raises(Unavailable):
        await transport.request("nobody", b"", timeout=0.3)
    with pytest.raises(Unavailable):
        await transport.append(SUBJECT, b"x", timeout=0.6)


async def test_fr_105_an_append_over_a_restart_is_stored_once(
    transport: Transport, nats_server: NatsServer
) -> None:
    """Sent while the server is away: it is stored once, and the answer is the stored sequence."""
    subject = tokens("r1")
    first = await transport.append(subject, b"0", expected_last_subject_sequence=0)
    await asyncio.to_thread(nats_server.stop)
    fenced = asyncio.create_task(
        transport.append(subject, b"1", expected_last_subject_sequence=first.sequence, timeout=PATIENCE_S)
    )
    plain = asyncio.create_task(transport.append(tokens("r2"), b"2", timeout=PATIENCE_S))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(nats_server.start)
    stored = await fenced
    await plain
    assert [(one.data, one.sequence) for one in await transport.read(JOURNAL.name, subject)] == [
        (b"0", first.sequence),
        (b"1", stored.sequence),
    ]
    assert len(await transport.read(JOURNAL.name, tokens("r2"))) == 1


async def test_subscriptions_and_services_survive_a_restart(
    transport: Transport, nats_server: NatsServer
) -> None:
    async def upper(message: object) -> bytes:
        return b"yes"

    subscription = await transport.subscribe("tok.r3")
    await transport.serve("brk.v1.*", "broker", upper, concurrency=1)
    await restart(nats_server)
    await until_ready(transport)
    assert subscription.dropped == 1  # who knows what was published meanwhile: the reader asks the journal
    other = await connect(nats_server.url, name="other")
    await other.append("tok.r3", b"x")
    message = await subscription.next(PATIENCE_S)
    assert message is not None
    assert message.data == b"x"
    assert await other.request("brk.v1.lookup", b"", timeout=PATIENCE_S) == b"yes"
    await other.close()


async def test_a_lost_connection_is_logged_once(
    transport: Transport, nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="shared.transport.nats"):
        await asyncio.to_thread(nats_server.stop)
        await until_away(transport)
        await asyncio.sleep(1.0)  # several attempts fail meanwhile
        await asyncio.to_thread(nats_server.start)
        await until_ready(transport)
    lost = [record for record in caplog.records if "is lost" in record.message]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lost) == 1
    assert len(warnings) <= 3
    assert any("up again" in record.message for record in caplog.records)


async def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    with pytest.raises(Unavailable) as caught:
        await connect("nats://user:hunter2@127.0.0.1:9", name="x", timeout=1.0)
    assert "127.0.0.1:9" in str(caught.value)
    assert "hunter2" not in str(caught.value)


async def test_a_wrong_password_is_refused(nats_server: NatsServer) -> None:
    host = nats_server.url.rpartition("@")[2]
    with pytest.raises(Unavailable, match=r"(?i)authorization"):
        await connect(f"nats://burstline:wrong@{host}", name="x", timeout=PATIENCE_S)


class Proxy:
    """A way to a server whose answers can get lost: muted, it carries requests and swallows what comes back."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: set[asyncio.Task[None]] = set()
        self.muted = False
        self.port = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def cut(self) -> None:
        """End every connection; new ones are taken."""
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(
                self._pump(reader, downstream, always=True), self._pump(upstream, writer, always=False)
            )
        finally:
            for end in (writer, downstream):
                end.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, always: bool) -> None:
        while data := await source.read(1 << 16):
            if always or not self.muted:
                sink.write(data)
                await sink.drain()


@pytest.fixture
async def proxied(nats_server: NatsServer) -> AsyncIterator[tuple[Proxy, Transport]]:
    head, _, port = nats_server.url.rpartition(":")
    proxy = Proxy(int(port))
    server = await proxy.start()
    transport = await connect(f"{head}:{proxy.port}", name="proxied")
    for spec in STREAMS:
        await transport.ensure_stream(spec)
    yield proxy, transport
    await transport.close()
    server.close()
    await proxy.cut()


async def test_an_append_whose_answer_is_lost_is_unavailable_and_found_when_repeated(
    proxied: tuple[Proxy, Transport],
) -> None:
    proxy, transport = proxied
    subject = tokens("lost")
    proxy.muted = True
    with pytest.raises(Unavailable):
        await transport.append(subject, b"x", expected_last_subject_sequence=0, timeout=0.6)
    proxy.muted = False
    await proxy.cut()
    await until_ready(transport)
    stored = await transport.append(subject, b"x", expected_last_subject_sequence=0, timeout=PATIENCE_S)
    assert stored.duplicate
    found = await transport.read(JOURNAL.name, subject)
    assert [(one.data, one.sequence) for one in found] == [(b"x", stored.sequence)]


@pytest.mark.parametrize("expected", [0, None])
async def test_an_append_finds_out_by_itself_what_became_of_it(
    proxied: tuple[Proxy, Transport], expected: int | None
) -> None:
    """The answer of the first try is lost with its connection; the call goes on until it knows."""
    proxy, transport = proxied
    subject = tokens("lost")
    proxy.muted = True
    appending = asyncio.create_task(
        transport.append(subject, b"x", expected_last_subject_sequence=expected, timeout=9.0)
    )
    await asyncio.sleep(0.5)
    proxy.muted = False
    await proxy.cut()
    stored = await appending
    found = await transport.read(JOURNAL.name, subject)
    assert [(one.data, one.sequence) for one in found] == [(b"x", stored.sequence)]


async def test_callers_who_gave_up_on_a_slow_server_do_not_cost_the_connection(
    transport: Transport, nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Their answers come all the same, later, and nobody waits for them."""
    child = nats_server.child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    try:
        gone = asyncio.create_task(transport.ready())
        await asyncio.sleep(0.1)
        gone.cancel()
        assert not await transport.ready()  # gave up by its own limit
    finally:
        os.kill(child.pid, signal.SIGCONT)
    await transport.append(
        SUBJECT, b"heard", timeout=PATIENCE_S / 6
    )  # a deaf connection would hear no answer
    assert "lost" not in caplog.text


async def test_a_reader_that_dies_of_an_error_is_a_lost_connection(
    transport: Transport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: Client) -> None:
        monkeypatch.undo()
        raise RuntimeError("a fault of the library")

    monkeypatch.setattr(Client, "_process_pong", broken)
    await transport.ready()
    await transport.append(SUBJECT, b"heard", timeout=PATIENCE_S / 6)
    assert "the connection to NATS is lost" in caplog.text


async def test_fr_104_a_sender_who_never_waits_is_made_to_wait(transport: Transport) -> None:
    """What it sends in one turn of the event loop is held in memory: that is bounded, and others get their turns."""
    client = transport._wire._client  # type: ignore[attr-defined]
    most = 0
    for _ in range(400):
        await transport.publish("nobody.hears", b"x" * 60_000)
        most = max(most, sum(map(len, client._pending)))
    assert most < 4 << 20


async def test_what_is_not_held_takes_no_room(transport: Transport) -> None:
    """An idle process that is asked for its readiness each second would fill its buffer for an outage with nothing."""
    for _ in range(3):
        assert await transport.ready()
    await asyncio.sleep(0)  # the turn's end
    assert transport._wire._client._pending_data_size == 0  # type: ignore[attr-defined]
