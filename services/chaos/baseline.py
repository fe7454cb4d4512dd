"""What must be as it was when all is over: the pools of every worker, open files, the books; and what the journals say."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import httpx
import psutil

from services.chaos.journal import Story, story
from services.embedded.faults import EmbeddedFault
from services.embedded.stack import Stack
from shared.clock import SYSTEM
from shared.protocol import codec, subjects
from shared.protocol.messages import Frame, Heartbeat, PromptScores, Started, StreamMessage, Terminal
from shared.telemetry import TASKS
from shared.transport.base import Transport

BEATS_S: Final = 20.0
"""Patience for a heartbeat of every worker."""
AUDIT_TIMEOUT_S: Final = 180
METRICS_S: Final = 5.0


async def queued(transport: Transport) -> int:
    """Requests in the queue, waiting or claimed."""
    counts = await transport.waiting(subjects.REQUESTS.name, subjects.REQUESTS.subjects[0])
    return sum(counts.values())


async def stories(transport: Transport) -> dict[str, Story]:
    """Every journal that is kept, by request."""
    name = subjects.JOURNAL.name
    found = {}
    for subject in await transport.waiting(name, subjects.JOURNAL.subjects[0]):
        messages: list[StreamMessage] = []
        deliveries: list[int] = []
        for received in await transport.read(name, subject):
            message = codec.decode(received.data)
            assert isinstance(message, Started | PromptScores | Frame | Terminal)
            messages.append(message)
            if isinstance(message, Started):
                deliveries.append(int(received.headers.get(subjects.DELIVERY, "0")))
        found[subjects.request_of(subject)] = story(messages, deliveries)
    return found


async def cancels(transport: Transport) -> dict[str, int]:
    """Cancellations that were journalled, by request."""
    counts = await transport.waiting(subjects.CANCELS.name, subjects.CANCELS.subjects[0])
    return {subjects.request_of(subject): count for subject, count in counts.items()}


async def pools(transport: Transport, workers: int) -> dict[str, Heartbeat]:
    """A heartbeat of every worker while it has nothing to do; the newest of one that is busy all the time."""
    found: dict[str, Heartbeat] = {}
    beats = await transport.subscribe(subjects.HEARTBEATS)
    until_ns = SYSTEM.monotonic_ns() + int(BEATS_S * 1e9)
    try:
        while SYSTEM.monotonic_ns() < until_ns:
            received = await beats.next(1.0)
            if received is None:
                continue
            beat = codec.decode_as(Heartbeat, received.data)
            found[beat.worker_id] = beat
            if len(found) == workers and not any(one.running or one.waiting for one in found.values()):
                break
    finally:
        await beats.close()
    return found


def off(before: dict[str, Heartbeat], now: dict[str, Heartbeat]) -> dict[str, str]:
    """Worker -> what is not as it was; without those that are."""
    found = {}
    for worker, old in before.items():
        new = now.get(worker)
        if new is None:
            found[worker] = "silent"
        elif (new.running, new.waiting, new.free_blocks) != (0, 0, old.free_blocks):
            found[worker] = (
                f"{new.running} running, {new.waiting} waiting, {new.free_blocks} of {new.total_blocks} blocks free"
            )
    return found


def open_files(line: Stack) -> dict[tuple[str, int], int]:
    """(name, pid) -> open files, of our services."""
    names = {name for service in ("worker", "gateway", "broker") for name in line.names(service)}
    return {(name, pid): psutil.Process(pid).num_fds() for name, pid in line.pids.items() if name in names}


async def tasks(line: Stack) -> dict[tuple[str, int], int]:
    """(name, pid) -> tasks of its event loop, of our services. One that does not answer is left out."""
    found = {}
    names = {name for service in ("worker", "gateway", "broker") for name in line.names(service)}
    async with httpx.AsyncClient(trust_env=False, timeout=METRICS_S) as client:
        for name, pid in line.pids.items():
            if name not in names:
                continue
            try:
                answer = await client.get(f"{line.health_url(name)}/metrics")
            except httpx.TransportError:
                continue
            found[name, pid] = gauge(answer.text, TASKS)
    return found


def gauge(scraped: str, name: str) -> int:
    """A gauge without labels in a scrape. Raises EmbeddedFault when it is not there."""
    for row in scraped.splitlines():
        if row.startswith(f"{name} "):
            return int(float(row.split()[1]))
    raise EmbeddedFault(f"{name} is not among the metrics")


def more(before: dict[tuple[str, int], int], now: dict[tuple[str, int], int]) -> dict[str, int]:
    """Name -> how much more, of the processes that lived all the time."""
    return {name: count - before[name, pid] for (name, pid), count in now.items() if (name, pid) in before}


def audit() -> subprocess.CompletedProcess[str]:
    """`burstline audit`, of the line that this process's environment names."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "services.cli", "audit"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=AUDIT_TIMEOUT_S,
    )
