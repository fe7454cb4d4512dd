"""The broker behind a queue: calls, heartbeats, settlement and traces, with the memory transport."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.cache_broker.app import serving
from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database
from services.cache_broker.settle import Settler
from shared.errors import Unavailable
from shared.protocol import chain, codec, subjects
from shared.protocol.messages import (
    Authenticate,
    ChoiceEnd,
    Frame,
    Heartbeat,
    Identity,
    Lookup,
    LookupReply,
    SpecTelemetry,
    Speculation,
    Terminal,
    pack_tokens,
)
from shared.telemetry import Telemetry, build
from shared.transport.base import Received
from shared.transport.memory import MemoryServer, MemoryTransport
from tests.integration.cache_broker.bench import FINGERPRINT, Bench, key, namespace
from tests.waiting import until

DEADLINE_S = 20.0


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(spans: InMemorySpanExporter) -> Telemetry:
    made = build("broker", None)
    made.provider.add_span_processor(SimpleSpanProcessor(spans))
    return made


@pytest.fixture
async def transport(bench: Bench, telemetry: Telemetry) -> AsyncIterator[MemoryTransport]:
    """A client's connection to a server that a broker serves on."""
    server = MemoryServer()
    broker = server.transport()
    async with serving(broker, bench.database, telemetry, bench.settings, bench.clock):
        client = server.transport()
        yield client
        await client.close()
    await broker.close()


def heartbeat(bench: Bench, *, epoch: str = "e1", worker: str = "w1") -> bytes:
    return codec.encode(
        Heartbeat(
            worker_id=worker, epoch=epoch, model="m", fingerprint=FINGERPRINT, vocabulary_size=1, max_context=1,
            speculation=Speculation(drafter="none", k=0), ready=True, draining=False, running=0, waiting=0,
            free_blocks=0, total_blocks=0, at_ns=bench.clock.wall_ns(),
        )
    )  # fmt: skip


def terminal(request: str, tenant: str = "t_1", completion_tokens: int = 7, model: str = "m") -> Terminal:
    return Terminal(
        request_id=request, tenant=tenant, key_id="k_1", model=model, attempt=1, worker_id="w1",
        ends=(
            ChoiceEnd(
                choice=0, finish="cancelled", completion_tokens=completion_tokens, emitted_tokens=completion_tokens,
                stop_id=None, spec=SpecTelemetry(rounds=1, drafted=3, accepted=2),
            ),
        ),
        failure=None, cancel_reason="client_disconnected", prompt_tokens=100, scored_tokens=0, cached_tokens=64,
        completion_tokens=completion_tokens, cache_decision="hit", reuse="prefill", exact=True, queue_ns=1, prime_ns=1, decode_ns=1,
        at_ns=1_750_000_000_000_000_000,
    )  # fmt: skip


async def test_a_call_is_answered_and_its_sql_is_in_the_callers_trace(
    bench: Bench, transport: MemoryTransport, telemetry: Telemetry, spans: InMemorySpanExporter
) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    space = namespace(tenant)
    call = Lookup(
        namespace=space, root=chain.root(space), chain=(key("a"),), layout_version=chain.LAYOUT_VERSION
    )
    with telemetry.span("gateway") as caller:
        answer = await transport.request(
            subjects.broker(Lookup), codec.encode(call), timeout=DEADLINE_S, headers=telemetry.headers(caller)
        )
    reply = codec.decode_as(LookupReply, answer)
    assert reply.entry is not None
    found = {span.name: span for span in spans.get_finished_spans()}
    trace = caller.get_span_context().trace_id
    served = found["broker lookup"]
    assert served.parent is not None
    assert served.parent.span_id == caller.get_span_context().span_id
    statement = found["UPDATE entries"]
    assert statement.parent is not None
    assert served.context is not None
    assert statement.parent.span_id == served.context.span_id
    assert {span.context.trace_id for span in found.values() if span.context} == {trace}
    assert key("a").hex() not in str([span.to_json() for span in found.values()])


async def test_failures_travel_as_replies(bench: Bench, transport: MemoryTransport) -> None:
    answer = await transport.request(
        subjects.broker(Authenticate), codec.encode(Authenticate(key_digest="0" * 64)), timeout=DEADLINE_S
    )
    failure = codec.decode_as(Identity, answer).failure
    assert failure is not None
    assert (failure.code, failure.status) == ("invalid_api_key", 401)


async def test_bytes_that_are_no_call_do_not_end_the_service(
    bench: Bench, transport: MemoryTransport
) -> None:
    with pytest.raises(Unavailable):
        await transport.request(subjects.broker(Authenticate), b"\x00", timeout=DEADLINE_S)
    await test_failures_travel_as_replies(bench, transport)


async def test_a_new_epoch_takes_the_old_ones_entries(bench: Bench, transport: MemoryTransport) -> None:
    tenant = await bench.tenant()
    await transport.publish(subjects.heartbeat("w1"), heartbeat(bench))
    await until(lambda: _is(bench, "SELECT epoch FROM workers", "e1"))
    await bench.publish(tenant, "a")
    late = heartbeat(bench)
    bench.clock.advance(1)
    await transport.publish(subjects.heartbeat("w1"), heartbeat(bench, epoch="e2"))
    await until(lambda: _is(bench, "SELECT count(*) FROM entries", 0))
    assert await bench.balanced() == {"acme": 0}
    await transport.publish(subjects.heartbeat("w1"), late)
    await transport.publish(subjects.heartbeat("w2"), heartbeat(bench, worker="w2"))
    await until(lambda: _is(bench, "SELECT count(*) FROM workers", 2))
    assert await _is(bench, "SELECT epoch FROM workers WHERE id = 'w1'", "e2")
    assert (await bench.reserve(tenant, "b")).failure.code == "epoch_gone"  # type: ignore[union-attr]
    bench.epoch = "e2"
    assert (await bench.reserve(tenant, "b")).decision == "granted"


async def test_fr_79_usage_is_settled_once_from_the_journal(bench: Bench, transport: MemoryTransport) -> None:
    """A cut stream is counted too; frames are passed over; the same end twice is one row."""
    frame = Frame(request_id="r1", attempt=1, choice=0, offset=0, tokens=pack_tokens([1]), logprobs=None)
    await transport.append(subjects.tokens("r1"), codec.encode(frame))
    await transport.append(subjects.tokens("r1"), b"not one of ours")
    for _ in range(2):
        await transport.append(subjects.tokens("r1"), codec.encode(terminal("r1")))
    await transport.append(subjects.tokens("r2"), codec.encode(terminal("r2", completion_tokens=9)))
    await until(lambda: _is(bench, "SELECT count(*) FROM usage WHERE request = 'r2'", 1))
    rows = await bench.rows("SELECT * FROM usage ORDER BY request")
    assert [(row.request, row.completion_tokens, row.cached_tokens) for row in rows] == [
        ("r1", 7, 64),
        ("r2", 9, 64),
    ]
    assert rows[0].cancel_reason == "client_disconnected"
    consumer = await transport.ensure_consumer(subjects.settle_consumer())
    await until(lambda: _nothing_pending(consumer))


async def test_an_ended_journal_is_cut_to_its_terminal_after_the_grace(
    bench: Bench, transport: MemoryTransport
) -> None:
    frame = Frame(request_id="r1", attempt=1, choice=0, offset=0, tokens=pack_tokens([1]), logprobs=None)
    for message in (frame, terminal("r1")):
        await transport.append(subjects.tokens("r1"), codec.encode(message))

    async def stored() -> list[bytes]:
        return [one.data for one in await transport.read(subjects.JOURNAL.name, subjects.tokens("r1"))]

    async def cut() -> bool:
        return await stored() == [codec.encode(terminal("r1"))]

    await until(lambda: _is(bench, "SELECT count(*) FROM usage WHERE request = 'r1'", 1))
    assert len(await stored()) == 2
    bench.clock.advance(bench.settings.journal_grace_s)
    await until(cut)


class Scripted:
    """A delivery that notes how it ended."""

    def __init__(self, message: Terminal) -> None:
        self.message = _received(codec.encode(message))
        self.delivery_count = 1
        self.ends: list[str] = []

    async def ack(self) -> None:
        self.ends.append("ack")

    async def pass_over(self) -> None:
        self.ends.append("passed over")

    async def nak(self, *, delay_s: float = 0.0) -> None:
        self.ends.append("nak")

    async def term(self) -> None:
        self.ends.append("term")

    async def progress(self) -> None:
        self.ends.append("progress")


async def test_settlement_is_handed_back_while_the_database_is_away(telemetry: Telemetry) -> None:
    away = Database("postgresql://nobody:x@127.0.0.1:9/none", BrokerSettings(connect_timeout_s=0.5))
    delivery, ended = Scripted(terminal("r1")), list[Terminal]()
    with pytest.raises(Unavailable):
        await Settler(away, telemetry.registry, ended=ended.append, replay_s=60).settle([delivery])
    assert (delivery.ends, ended) == (["nak"], [])
    await away.close()


async def test_one_row_that_postgres_refuses_holds_up_no_other(bench: Bench, telemetry: Telemetry) -> None:
    """A NUL cannot be stored in a text column; the other requests of the batch still count."""
    ended = list[Terminal]()
    batch = [Scripted(terminal("r1")), Scripted(terminal("r2", model="a\x00b")), Scripted(terminal("r3"))]
    await Settler(bench.database, telemetry.registry, ended=ended.append, replay_s=60).settle(list(batch))
    assert [delivery.ends for delivery in batch] == [["ack"]] * 3
    assert [one.request_id for one in ended] == ["r1", "r2", "r3"]
    assert [row.request for row in await bench.rows("SELECT request FROM usage ORDER BY 1")] == ["r1", "r3"]


def _received(data: bytes) -> Any:
    return Received(subject="tok.x", data=data)


async def _is(bench: Bench, query: str, value: object) -> bool:
    rows = await bench.rows(query)
    return bool(rows) and rows[0][0] == value


async def _nothing_pending(consumer: Any) -> bool:
    return bool(await consumer.pending() == 0)
