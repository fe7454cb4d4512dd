"""NATS and Postgres supervisors against the real binaries: crashes, leftovers, ports, half-made clusters."""

from __future__ import annotations

import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from services.embedded import cluster, ports
from services.embedded.faults import Cancelled, EmbeddedFault
from services.embedded.nats import NatsServer
from services.embedded.postgres import PostgresServer
from services.embedded.process import alive
from services.embedded.waiting import until


@pytest.fixture
def folder() -> Iterator[Path]:
    """Reachable for `nobody`, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="burstline-test-") as path:
        yield Path(path)


def pid_of(server: NatsServer | PostgresServer) -> int:
    assert server.child is not None
    return server.child.pid


async def rows(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM kept"))
    finally:
        await connection.close()


async def test_postgres_survives_a_kill_of_its_supervisor(folder: Path) -> None:
    """A second start ends the orphan, recovers, and finds what was committed."""
    first = PostgresServer(folder)
    first.start()
    orphan = psutil.Process(pid_of(first))
    try:
        connection = await asyncpg.connect(first.url)
        await connection.execute("CREATE TABLE kept (x int); INSERT INTO kept VALUES (1), (2)")
        await connection.close()
        with PostgresServer(folder) as second:  # `first` never stopped: as after kill -9 of its process
            assert not alive(orphan)
            assert await rows(second.url) == 2
    finally:
        first.stop()


async def test_postgres_is_found_without_a_pid_file(folder: Path) -> None:
    """Killed between the spawn and the pid file: postmaster.pid tells."""
    first = PostgresServer(folder, durable=False)
    first.start()
    orphan = psutil.Process(pid_of(first))
    try:
        (folder / "run" / "postgres.json").unlink()
        with PostgresServer(folder, durable=False) as second:
            assert not alive(orphan)
            assert second.sql("SELECT 1") == "1"
    finally:
        first.stop()


def test_postgres_restarts_after_a_crash_on_its_port(folder: Path) -> None:
    with PostgresServer(folder) as server:
        url = server.url
        assert server.child is not None
        server.child.stop(ask=[signal.SIGQUIT], each_s=30)
        server.start()
        assert server.url == url
        assert server.sql("SELECT 1") == "1"


def test_a_half_made_cluster_is_made_again(folder: Path) -> None:
    """initdb killed half-way leaves only drafts, and the next start begins anew."""
    asked: list[int] = []

    def half_way() -> bool:
        asked.append(1)
        return (folder / "draft-cluster" / "base").exists()

    with pytest.raises(Cancelled):
        PostgresServer(folder, durable=False, stop=half_way).start()
    assert asked
    assert not (folder / "cluster").exists()
    (folder / "draft-cluster").mkdir()
    (folder / "draft-cluster" / "PG_VERSION").write_text("1")
    with PostgresServer(folder, durable=False) as server:
        assert server.sql("SHOW server_encoding") == "UTF8"
    assert not list(folder.glob("draft-*"))


def test_a_cluster_of_another_version_is_refused(folder: Path) -> None:
    with PostgresServer(folder, durable=False):
        pass
    (folder / "cluster" / "PG_VERSION").write_text("12\n")
    with pytest.raises(EmbeddedFault, match="is of Postgres 12"):
        PostgresServer(folder, durable=False).start()


def test_postgres_listens_on_loopback_alone_with_a_password(folder: Path) -> None:
    with PostgresServer(folder, durable=False) as server:
        listeners = {
            item.laddr.ip
            for item in psutil.Process(pid_of(server)).net_connections("inet")
            if item.status == psutil.CONN_LISTEN
        }
        assert listeners == {"127.0.0.1"}
        assert stat.S_IMODE((folder / "password").stat().st_mode) == 0o600
        assert psutil.Process(pid_of(server)).uids().effective != 0
        assert "scram-sha-256" in server.sql("SELECT DISTINCT auth_method FROM pg_hba_file_rules")


def test_the_binaries_work_from_beside_the_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root with the environment in a closed folder, the server runs from a copy."""
    if cluster.server_account() is None:
        pytest.skip("only root changes its account")
    binaries = cluster.installed_binaries()
    reach = cluster.can_reach
    monkeypatch.setattr(
        cluster, "can_reach", lambda account, path: binaries not in path.parents and reach(account, path)
    )
    with PostgresServer(folder, durable=False) as server:
        assert server.sql("SELECT 1") == "1"
        assert folder in Path(psutil.Process(pid_of(server)).exe()).parents


def test_a_closed_data_folder_moves_the_cluster_outside(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root under a folder that `nobody` may not enter; a cluster whose data folder is gone is deleted."""
    if cluster.server_account() is None:
        pytest.skip("only root changes its account")
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    outside = folder / "outside"
    gone = outside / "0123"
    gone.mkdir(parents=True)
    (gone / cluster.OWNER_FILE).write_text(str(folder / "no longer there"))
    place = cluster.settle(closed / "postgres", outside)
    assert place.base.parent == outside
    assert not gone.exists()
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


def test_nats_survives_a_kill_of_its_supervisor(folder: Path) -> None:
    first = NatsServer(folder)
    first.start()
    orphan = psutil.Process(pid_of(first))
    try:
        with NatsServer(folder):
            assert not alive(orphan)
    finally:
        first.stop()


def test_nats_listens_on_loopback_alone(nats_server: NatsServer) -> None:
    listeners = {
        item.laddr.ip
        for item in psutil.Process(pid_of(nats_server)).net_connections("inet")
        if item.status == psutil.CONN_LISTEN
    }
    assert listeners == {"127.0.0.1"}


@pytest.mark.parametrize("kind", [NatsServer, PostgresServer])
def test_a_port_taken_meanwhile_gives_another(
    kind: type[NatsServer] | type[PostgresServer], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind((ports.LOOPBACK, 0))
        taken.listen()
        offers = iter([taken.getsockname()[1], *(ports.free_port() for _ in range(3))])
        for module in ("nats", "postgres"):
            monkeypatch.setattr(f"services.embedded.{module}.free_port", lambda: next(offers))
        with kind(folder) as server:
            assert str(taken.getsockname()[1]) not in server.url.rpartition("@")[2]


def test_a_server_that_cannot_start_shows_its_log(folder: Path) -> None:
    with PostgresServer(folder, durable=False):
        pass
    (folder / "cluster" / "postgresql.conf").write_text("no_such_setting = 1\n")
    with pytest.raises(EmbeddedFault, match="no_such_setting"):
        PostgresServer(folder, durable=False).start()


def test_cancelled_while_starting_leaves_nothing(folder: Path) -> None:
    server = NatsServer(folder, stop=lambda: True)
    with pytest.raises(Cancelled):
        server.start()
    assert server.child is None
    assert until(lambda: not list((folder / "run").iterdir()), timeout_s=10)
