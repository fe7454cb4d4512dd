"""`burstline audit`: what it finds, and what it says of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text

from services.cache_broker.audit import PAGE, Report, audit
from services.cache_broker.report import bars
from shared.protocol import chain, codec, subjects
from shared.protocol.messages import AuditCall, AuditReply, HeldEntry
from shared.transport.base import Received
from shared.transport.memory import MemoryServer, MemoryTransport
from tests.integration.cache_broker.bench import Bench, key, namespace


class FakeWorker:
    """Answers the audit with what it is told to hold."""

    def __init__(self) -> None:
        self.held: list[HeldEntry] = []

    async def answer(self, received: Received) -> bytes:
        call = codec.decode_as(AuditCall, received.data)
        page = tuple(self.held[call.skip : call.skip + call.limit])
        return codec.encode(
            AuditReply(failure=None, worker_id="w1", epoch="e1", total=len(self.held), entries=page)
        )

    def hold(self, tenant: str, name: str, state_bytes: int = 60, kv_bytes: int = 40) -> None:
        root = chain.root(namespace(tenant))
        self.held.append(HeldEntry(root=root, key=key(name), state_bytes=state_bytes, kv_bytes=kv_bytes))


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the looks at what differs: nobody changes anything here meanwhile."""
    monkeypatch.setattr("services.cache_broker.audit.PAUSE_S", 0.01)


@pytest.fixture
async def transport() -> AsyncIterator[MemoryTransport]:
    made = MemoryServer().transport()
    yield made
    await made.close()


@pytest.fixture
async def worker(transport: MemoryTransport) -> FakeWorker:
    made = FakeWorker()
    await transport.serve(subjects.audit("w1"), "w1", made.answer, concurrency=1)
    return made


def failing(report: Report) -> set[str]:
    return {bar.name for bar in bars(report) if not bar.holds}


async def test_c5_all_is_well_when_ledger_entries_and_bytes_agree(
    bench: Bench, transport: MemoryTransport, worker: FakeWorker
) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "p")
    await bench.publish(tenant, "c", parent=key("p"), parent_position=64, position=128)
    await bench.withdraw("p")
    await bench.freed("p")
    await bench.reserve(tenant, "not yet there")
    worker.hold(tenant, "p", state_bytes=0)
    worker.hold(tenant, "c")
    report = await audit(bench.database, transport, bench.clock)
    assert failing(report) == set()
    assert report.asked == ("w1",)
    assert report.books[0].counter_bytes == 240


async def test_real_bytes_that_nobody_charges_and_the_other_way_round_are_found(
    bench: Bench, transport: MemoryTransport, worker: FakeWorker
) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "charged")
    await bench.publish(tenant, "larger")
    worker.hold(tenant, "larger", kv_bytes=41)
    worker.hold(tenant, "secret")
    report = await audit(bench.database, transport, bench.clock)
    assert failing(report) == {"real minus charged bytes", "entries that differ at a worker"}
    assert {(one.charged_bytes, one.real_bytes) for one in report.differences} == {
        (100, 0),
        (0, 100),
        (100, 101),
    }


async def test_a_silent_worker_is_named_and_not_counted(bench: Bench, transport: MemoryTransport) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    report = await audit(bench.database, transport, bench.clock)
    assert (report.asked, report.silent) == ((), ("w1",))
    assert failing(report) == set()


async def test_many_entries_come_in_pages(
    bench: Bench, transport: MemoryTransport, worker: FakeWorker
) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")
    for number in range(PAGE + 5):
        worker.hold(tenant, f"e{number}")
    report = await audit(bench.database, transport, bench.clock)
    assert len(report.differences) == PAGE + 6


@pytest.mark.parametrize(
    ("statement", "bar"),
    [
        ("UPDATE quotas SET used_bytes = used_bytes + 1", "counter minus entries"),
        ("UPDATE ledger SET bytes = bytes + 1 WHERE kind = 'reserve'", "ledger minus entries"),
        ("UPDATE workers SET epoch = 'e2'", "orphaned entries"),
        ("UPDATE entries SET state = 'reserved', reserved_until = '2020-01-01'", "expired reservations"),
        (
            "INSERT INTO leases (id, entry, worker, request, expires) SELECT 'l', id, 'w', 'r', '2020-01-01' FROM entries",
            "expired leases",
        ),
    ],
)
async def test_each_bar_can_fail(bench: Bench, transport: MemoryTransport, statement: str, bar: str) -> None:
    tenant = await bench.tenant()
    await bench.publish(tenant, "a")

    async def spoil(connection: object) -> None:
        await connection.execute(text(statement))  # type: ignore[attr-defined]

    await bench.database.run(spoil)
    assert failing(await audit(bench.database, transport, bench.clock)) == {bar}
