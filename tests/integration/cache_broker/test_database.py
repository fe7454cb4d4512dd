"""What happens to connections and transactions when callers leave, statements hang and Postgres goes away."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database, driver_url
from services.embedded.postgres import PostgresServer
from shared.errors import BurstlineError, Overloaded, Unavailable
from tests.integration.cache_broker.bench import Bench


@pytest.fixture
async def small(database_url: str) -> AsyncIterator[Database]:
    """One connection, short limits."""
    database = Database(
        database_url,
        BrokerSettings(pool_size=1, pool_timeout_s=0.3, statement_timeout_ms=1000, lock_timeout_ms=300),
    )
    yield database
    await database.close()


def statement(sql: str) -> Any:
    async def work(connection: Any) -> Any:
        return (await connection.execute(text(sql))).scalar()

    return work


async def test_fr_112_callers_that_leave_cost_no_connection_and_no_lock(bench: Bench) -> None:
    """Hundreds of cancelled reservations: the pool is whole, nothing is idle in a transaction, the books balance."""
    tenant = await bench.tenant(cache_bytes=10**9)
    tasks = []
    for number in range(300):
        tasks.append(asyncio.create_task(bench.reserve(tenant, f"e{number}")))
        await asyncio.sleep(0)
        if number % 7 == 0:
            await bench.database.run(statement("SELECT 1"))
        tasks[number // 2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await bench.database.close()  # waits for what was left running
    assert bench.database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    await bench.balanced()
    stuck = await bench.rows(
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
    )
    assert stuck == []


async def test_fr_114_a_hanging_statement_is_cut_and_the_connection_is_good_again(small: Database) -> None:
    with pytest.raises(Overloaded) as caught:
        await small.run(statement("SELECT pg_sleep(30)"))
    assert caught.value.code == "database_busy"
    assert await small.run(statement("SELECT 7")) == 7


async def test_fr_116_a_full_pool_is_told_soon_and_the_probe_still_works(small: Database) -> None:
    held, release = asyncio.Event(), asyncio.Event()

    async def hold(connection: Any) -> None:
        await connection.execute(text("SELECT 1"))
        held.set()
        await release.wait()

    holder = asyncio.create_task(small.run(hold))
    await held.wait()
    with pytest.raises(Overloaded):
        await small.run(statement("SELECT 1"))
    assert await small.ready()
    release.set()
    await holder


async def test_an_exception_rolls_back(bench: Bench) -> None:
    await bench.tenant()

    async def half(connection: Any) -> None:
        await connection.execute(text("UPDATE quotas SET used_bytes = 99"))
        raise BurstlineError("no")

    with pytest.raises(BurstlineError, match="no"):
        await bench.database.run(half)
    assert await bench.balanced() == {"acme": 0}


async def test_a_connection_killed_in_mid_transaction_leaves_nothing_behind(bench: Bench) -> None:
    """The server ends the session between two statements: Unavailable, rolled back, and the next call works."""
    await bench.tenant()

    async def work(connection: Any) -> None:
        await connection.execute(text("UPDATE quotas SET used_bytes = 99"))
        mine = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar()
        await bench.database.run(statement(f"SELECT pg_terminate_backend({mine})"))
        await connection.execute(text("SELECT 1"))

    with pytest.raises(Unavailable) as caught:
        await bench.database.run(work)
    assert caught.value.code == "database_unavailable"
    assert await bench.balanced() == {"acme": 0}


async def test_a_deadlock_is_tried_again(bench: Bench) -> None:
    one, two = await bench.tenant("one"), await bench.tenant("two")
    both = asyncio.Barrier(2)
    attempts = []

    def crosswise(first: str, second: str) -> Any:
        async def work(connection: Any) -> None:
            attempts.append(first)
            add = "UPDATE quotas SET max_concurrent = coalesce(max_concurrent, 0) + 1 WHERE tenant = '{}'"
            await connection.execute(text(add.format(first)))
            if len(attempts) <= 2:
                await both.wait()
            await connection.execute(text(add.format(second)))

        return work

    await asyncio.gather(bench.database.run(crosswise(one, two)), bench.database.run(crosswise(two, one)))
    assert len(attempts) == 3
    assert [row.max_concurrent for row in await bench.rows("SELECT max_concurrent FROM quotas")] == [2, 2]


async def test_errors_tell_no_statement_and_no_value(bench: Bench) -> None:
    with pytest.raises(BurstlineError) as caught:
        await bench.database.run(statement("SELECT 'secret-value' FROM secret_table"))
    assert caught.value.code == "database_error"
    assert "secret" not in str(caught.value)


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that the test may stop."""
    with tempfile.TemporaryDirectory(prefix="burstline-postgres-") as folder:
        server = PostgresServer(Path(folder), durable=False)
        server.start()
        try:
            yield server
        finally:
            server.stop()


async def test_the_broker_outlives_a_restart_of_postgres(own_server: PostgresServer) -> None:
    database = Database(own_server.url, BrokerSettings(pool_size=2, connect_timeout_s=2, pool_timeout_s=2))
    assert await asyncio.gather(*(database.run(statement("SELECT 1")) for _ in range(2))) == [1, 1]
    await asyncio.to_thread(own_server.stop)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await database.run(statement("SELECT 1"))
    assert not await database.ready()
    await asyncio.to_thread(own_server.start)
    assert await asyncio.gather(*(database.run(statement("SELECT 2")) for _ in range(4))) == [2] * 4
    assert await database.ready()
    await database.close()


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg"])
def test_usual_spellings_of_the_url(scheme: str) -> None:
    assert driver_url(f"{scheme}://u:p@h/d") == "postgresql://u:p@h/d"


def test_another_database_is_refused_without_its_url() -> None:
    with pytest.raises(BurstlineError) as caught:
        driver_url("mysql://user:secret@h/d")
    assert "secret" not in caught.value.message
