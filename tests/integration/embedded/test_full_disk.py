"""The disk under NATS is full: appends fail in bounded time, other streams go on, and with room all is as before."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.embedded import nats as embedded_nats
from services.embedded.children import Keeper
from services.embedded.mending import LOOK_S, Mender
from services.embedded.nats import NatsServer
from services.embedded.restarts import RestartPolicy
from shared.clock import ManualClock
from shared.errors import BurstlineError
from shared.protocol import subjects
from shared.transport.base import Transport
from shared.transport.nats import connect
from tests.waiting import until

DISK_MIB = 24
BALLAST_BYTES = 10 << 20
PIECE = b"x" * 250_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=711", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    ) if os.geteuid() == 0 else None  # fmt: skip
    if mounted is None or mounted.returncode != 0:
        pytest.skip("only who may mount a file system can fill one up")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


async def _fill(transport: Transport) -> tuple[int, BurstlineError]:
    """Append until it fails: how many were acknowledged, and how the next one failed."""
    for stored in range(DISK_MIB * 5):
        try:
            await transport.append(subjects.tokens("r1"), PIECE)
        except BurstlineError as error:
            return stored, error
    raise AssertionError("the disk does not get full")


async def test_fr_101_a_full_disk_refuses_is_told_and_heals_with_room(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_nats, "ROOM_BYTES", BALLAST_BYTES // 2)
    clock, said = ManualClock(), list[str]()
    server = NatsServer(disk / "nats")
    policy = RestartPolicy(limit=3, window_s=60, backoff_s=0.1, backoff_limit_s=0.1)
    keeper, mender = Keeper("nats", server, policy, said.append, clock), Mender(server, said.append, clock)

    def tick() -> None:
        clock.advance(LOOK_S)
        mender.tick()
        keeper.tick()

    with server:
        transport = await connect(server.url, name="test")
        try:
            for spec in (subjects.JOURNAL, subjects.REQUESTS):
                await transport.ensure_stream(spec)
            assert server.store_fault() is None
            ballast = disk / "ballast"
            ballast.write_bytes(b"x" * BALLAST_BYTES)
            stored, refused = await _fill(transport)
            assert refused.status == 503
            assert stored
            assert "no space left" in (server.store_fault() or "")
            await transport.append(subjects.request_shared("f" * 64, "normal", "t"), b"small")
            tick()
            assert server.child is not None
            assert server.child.running
            ballast.unlink()
            before = server.child.pid

            def restarted() -> bool:
                tick()
                return server.child is not None and server.child.running and server.child.pid != before

            await until(restarted)
            assert server.store_fault() is None
            await until(transport.ready)
            await transport.append(subjects.tokens("r2"), PIECE)
            assert len(await transport.read(subjects.JOURNAL.name, subjects.tokens("r1"))) == stored
            assert sum("stores nothing" in line for line in said) == 1
        finally:
            await transport.close()
