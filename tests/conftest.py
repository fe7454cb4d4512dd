"""Fixtures that several folders of tests share: real servers, started once a session and only when asked for.

nats_url           a NATS server of the test's own, empty
session_nats_url   one server for the session, for tests that name their streams and subjects themselves
database_url       a fresh, empty database on the session's Postgres; dropped after the test
migrated_url       the same with this build's tables, which are made once a session
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.embedded.nats import NatsServer
from services.embedded.postgres import PostgresServer
from tests.interpreter import quicken
from tests.spread import Spread, turn

# Threads of a pool sleep between two loops (read when torch is loaded): those that turn instead take the processor from the
# process beside them, and a test with two threads takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spread:
    config.option.loadscopereorder = False
    return Spread(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: turn(item.nodeid))


def pytest_collection_finish() -> None:
    """Where a file that was collected asked for triton's interpreter, it is a quicker one."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton.runtime import interpreter

        quicken(interpreter)


@pytest.fixture(autouse=True)
def _settings_stay_put() -> Iterator[None]:
    """A test that leaves a variable of ours behind fails itself, and not one that reads its settings later."""
    before = _ours()
    yield
    after = _ours()
    for name in after.keys() - before.keys():
        del os.environ[name]
    assert after == before, "the test changed BURSTLINE_ variables of this process"


def _ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("BURSTLINE_")}


@pytest.fixture
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server of the test's own: it may be stopped and started again (it keeps its port and its store)."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture(scope="session")
def session_nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Killed at the end: one that has had a thousand consumers takes ten seconds to stop."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server.url
        assert server.child is not None
        os.kill(server.child.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The session's server, without fsync. Not under pytest's own folder, which `nobody` may not enter."""
    with (
        tempfile.TemporaryDirectory(prefix="burstline-postgres-") as folder,
        PostgresServer(Path(folder), durable=False) as server,
    ):
        yield server


@pytest.fixture
def database_url(postgres_server: PostgresServer) -> Iterator[str]:
    with _database(postgres_server, "template1") as url:
        yield url


@pytest.fixture
def migrated_url(postgres_server: PostgresServer, migrated: str) -> Iterator[str]:
    with _database(postgres_server, migrated) as url:
        yield url


@pytest.fixture(scope="session")
def migrated(postgres_server: PostgresServer) -> str:
    """A database that others are copied from."""
    from services.cache_broker.config import BrokerSettings  # with SQL, which most tests do without
    from services.cache_broker.migrate import migrate

    name = "migrated"
    postgres_server.create_database(name)
    asyncio.run(migrate(postgres_server.url_of(name), BrokerSettings()))
    return name


@contextmanager
def _database(server: PostgresServer, template: str) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    server.sql(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    yield server.url_of(name)
    server.sql(f'DROP DATABASE "{name}" WITH (FORCE)')
