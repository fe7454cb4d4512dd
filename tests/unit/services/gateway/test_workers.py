"""Which workers live, whose fingerprint counts, and where a request goes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from services.gateway.routing import choose
from services.gateway.workers import Crew, Fleet
from shared.clock import ManualClock
from shared.protocol import codec, subjects
from shared.protocol.messages import EntryRef
from shared.transport.memory import MemoryTransport
from tests.unit.services.gateway.line import FINGERPRINT, FakeWorker, Line

TRANSPORT = MemoryTransport()
WORKER = FakeWorker(TRANSPORT)


def fleet(clock: ManualClock, *changes: dict[str, Any]) -> Fleet:
    found = Fleet(TRANSPORT, clock, silence_s=10)
    for change in changes:
        found.note(WORKER.heartbeat(**change))
    return found


def test_silence_means_dead() -> None:
    clock = ManualClock()
    found = fleet(clock, {"worker_id": "a"})
    clock.advance(9)
    clock.advance(2)
    assert found.crew("pocket") is None


def test_draining_and_loading_workers_take_nothing() -> None:
    found = fleet(ManualClock(), {"worker_id": "a", "draining": True}, {"worker_id": "b", "ready": False})
    assert found.crew("pocket") is None


def test_the_fingerprint_with_most_workers_counts_and_ties_go_to_the_smallest() -> None:
    found = fleet(
        ManualClock(),
        {"worker_id": "a", "fingerprint": "2" * 64},
        {"worker_id": "b", "fingerprint": "1" * 64},
    )
    crew = found.crew("pocket")
    assert crew is not None
    assert crew.fingerprint == "1" * 64
    found.note(WORKER.heartbeat(worker_id="c", fingerprint="2" * 64, max_context=1000))
    crew = found.crew("pocket")
    assert crew is not None
    assert (crew.fingerprint, crew.window, len(crew.workers)) == ("2" * 64, 1000, 2)


async def test_heartbeats_are_heard_and_bad_ones_dropped() -> None:
    found = Fleet(TRANSPORT, ManualClock(), silence_s=10)
    listening = asyncio.Event()
    task = asyncio.create_task(found.run(listening))
    await listening.wait()
    await TRANSPORT.publish("hb.x", b"not a heartbeat")
    await TRANSPORT.publish(subjects.heartbeat("w1"), codec.encode(WORKER.heartbeat()))
    crew = await found.wait_for_crew("pocket", grace_s=10)
    task.cancel()
    assert crew is not None
    assert crew.leader.worker_id == "w1"


async def test_grace_waits_for_a_first_worker_and_ends() -> None:
    from shared.clock import SYSTEM

    found = Fleet(TRANSPORT, SYSTEM, silence_s=10)
    assert await found.wait_for_crew("pocket", grace_s=0.05) is None


async def test_routing_passes_over_holders_that_are_gone_or_busy(line: Line) -> None:
    await line.chat()
    request = line.worker.works[0].request
    idle, busy = WORKER.heartbeat(worker_id="idle"), WORKER.heartbeat(worker_id="busy", waiting=9)
    crew = Crew(fingerprint=FINGERPRINT, workers=(idle, busy))

    def route(*holders: str) -> tuple[str, str | None]:
        entry = EntryRef(key=b"k" * 32, position=64, workers=holders)
        found = choose(request, crew, entry, max_waiting=4)
        return found.reason, found.worker

    assert route("idle", "busy") == ("affinity", "idle")
    assert route("busy") == ("holder_unavailable", None)
    assert route("dead") == ("holder_unavailable", None)
    assert choose(request, crew, None, max_waiting=4).reason == "shared"


async def test_a_holder_where_requests_wait_is_passed_over_when_it_has_no_pages_for_one_more(
    line: Line,
) -> None:
    await line.chat()
    request = msgspec.structs.replace(line.worker.works[0].request, prompt=bytes(4 * 640), choices=2)
    entry = EntryRef(key=b"k" * 32, position=64, workers=("w1",))

    def route(**beat: int) -> str:
        crew = Crew(fingerprint=FINGERPRINT, workers=(WORKER.heartbeat(**beat),))
        return choose(request, crew, entry, max_waiting=4).reason

    needs = 9 + 2
    assert route(waiting=1, free_blocks=needs, total_blocks=100) == "affinity"
    assert route(waiting=1, free_blocks=needs - 1, total_blocks=100) == "holder_unavailable"
    assert route(waiting=0, free_blocks=0, total_blocks=100) == "affinity"
    assert route(waiting=1, free_blocks=0, total_blocks=0) == "affinity", "a worker that does not know yet"
