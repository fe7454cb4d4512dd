"""Any sequence of calls keeps the broker equal to a model of it, and the books balanced after every step (C5)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text

from services.cache_broker import presence
from shared.protocol.messages import Heartbeat, Release, Speculation
from tests.integration.cache_broker.bench import FINGERPRINT, Bench, bench_on, key

QUOTA = 450
TTL = 60
LEASE_S = 30
PARENT = {"a": None, "b": "a", "c": "b", "d": "a", "e": None}
POSITION = {"a": 64, "b": 128, "c": 192, "d": 256, "e": 320}
STATE, KV = 60, 40

# Mostly one tenant and one worker, so that entries meet.
TENANTS = st.sampled_from(["one", "one", "one", "two"])
NAMES = st.sampled_from(sorted(PARENT))
WORKERS = st.sampled_from(["w1", "w1", "w1", "w2"])


@dataclass
class ModelEntry:
    """What the model knows of an entry."""

    worker: str
    state: str
    request: str
    reservation: str
    until: float
    leases: dict[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return KV + (0 if self.state == "rows" else STATE)


class Books(RuleBasedStateMachine):
    """Two tenants, two workers, a forest of five entries each."""

    runner: asyncio.Runner
    bench: Bench

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[tuple[str, str], ModelEntry] = {}
        self.leases: dict[str, str | None] = {}
        self.epochs = {"w1": 1, "w2": 1}
        self.now = 0.0
        self.requests = 0
        self.do(self._empty())

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def _empty(self) -> None:
        async def wipe(connection: Any) -> None:
            await connection.execute(text("TRUNCATE tenants, workers CASCADE"))

        await self.bench.database.run(wipe)
        for name in ("one", "two"):
            await self.bench.tenant(name, cache_bytes=QUOTA)
        for worker in self.epochs:
            await self._beat(worker)

    async def _beat(self, worker: str) -> bool:
        beat = Heartbeat(
            worker_id=worker,
            epoch=self.epoch(worker),
            model="m",
            fingerprint=FINGERPRINT,
            vocabulary_size=1,
            max_context=1,
            speculation=Speculation(drafter="none", k=0),
            ready=True,
            draining=False,
            running=0,
            waiting=0,
            free_blocks=0,
            total_blocks=0,
            at_ns=self.bench.clock.wall_ns(),
        )
        now = self.bench.clock.now()
        return await self.bench.database.run(lambda c: presence.note(c, beat, now=now))

    def epoch(self, worker: str) -> str:
        return f"{worker}-{self.epochs[worker]}"

    def act_as(self, worker: str) -> Bench:
        self.bench.worker, self.bench.epoch = worker, self.epoch(worker)
        return self.bench

    def children(self, tenant: str, name: str) -> list[ModelEntry]:
        return [
            self.entries[tenant, child]
            for child in PARENT
            if PARENT[child] == name and (tenant, child) in self.entries
        ]

    def used(self, tenant: str) -> int:
        return sum(entry.size for (owner, _), entry in self.entries.items() if owner == tenant)

    def drop(self, tenant: str, name: str) -> None:
        if self.children(tenant, name):
            self.entries[tenant, name].state = "rows"
            self.entries[tenant, name].leases.clear()
            return
        del self.entries[tenant, name]
        parent = PARENT[name]
        if (
            parent is not None
            and (tenant, parent) in self.entries
            and self.entries[tenant, parent].state == "rows"
        ):
            self.drop(tenant, parent)

    def leased(self, entry: ModelEntry) -> bool:
        return any(end > self.now for end in entry.leases.values())

    @initialize()
    def some_entries(self) -> None:
        """A tree to begin with: what is of interest happens to entries with children."""
        for name in ("a", "b", "d"):
            self.publish_one("one", name, "w1")

    @rule(tenant=TENANTS, name=NAMES, worker=WORKERS)
    def reserve_alone(self, tenant: str, name: str, worker: str) -> None:
        self.reserve(tenant, name, worker)

    def reserve(self, tenant: str, name: str, worker: str) -> None:
        self.requests += 1
        request, parent = f"r{self.requests}", PARENT[name]
        reply = self.do(
            self.act_as(worker).reserve(
                self.bench.tenants[tenant],
                name,
                request_id=request,
                position=POSITION[name],
                parent=None if parent is None else key(parent),
                parent_position=0 if parent is None else POSITION[parent],
            )
        )
        known = self.entries.get((tenant, name))
        if known is not None and known.worker == worker and known.state == "evicting":
            self.drop(tenant, name)
            known = self.entries.get((tenant, name))
        revive = known is not None and known.worker == worker and known.state == "rows"
        if known is not None and not revive:
            assert reply.decision == "exists"
            return
        below = None if parent is None else self.entries.get((tenant, parent))
        if parent is not None and (below is None or below.worker != worker):
            assert reply.failure is not None
            assert reply.failure.code == "parent_gone"
            return
        size = STATE if revive else STATE + KV
        if self.used(tenant) + size > QUOTA:
            assert reply.decision in ("evict", "skips_pinned")
            for evict in reply.evict:
                entry = next(
                    one
                    for (owner, other), one in self.entries.items()
                    if key(other) == evict and owner == tenant
                )
                assert entry.worker == worker
                assert entry.state in ("live", "evicting")
                assert not self.leased(entry)
            return
        assert reply.decision == "granted"
        self.entries[tenant, name] = ModelEntry(
            worker, "reserved", request, reply.reservation_id, self.now + TTL
        )

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        entry = self.entries[data.draw(st.sampled_from(sorted(self.entries)))]
        reply = self.do(self.act_as(entry.worker).commit(entry.reservation))
        if entry.state in ("reserved", "live"):
            assert reply.failure is None
            entry.state = "live"
        else:
            assert reply.failure.code == "reservation_gone"

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        tenant, name = data.draw(st.sampled_from(sorted(self.entries)))
        entry = self.entries[tenant, name]
        assert self.do(self.act_as(entry.worker).abort(entry.reservation)).failure is None
        if entry.state in ("reserved", "live"):
            self.drop(tenant, name)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """What a holder does with an entry of its own."""
        _, name = data.draw(st.sampled_from(sorted(self.entries)))
        worker = next(entry.worker for (_, other), entry in sorted(self.entries.items()) if other == name)
        self.withdraw({name}, worker)
        self.freed({name}, worker)

    @rule(tenant=TENANTS, data=st.data())
    def publish(self, tenant: str, data: st.DataObject) -> None:
        """What a worker does: an entry on a parent that it holds, or on none."""
        holders = {
            name: self.entries[tenant, name].worker for name in PARENT if (tenant, name) in self.entries
        }
        free = [name for name, parent in PARENT.items() if parent is None or parent in holders]
        name = data.draw(st.sampled_from(free))
        worker = holders.get(PARENT[name] or "", "w1")
        self.publish_one(tenant, name, worker)

    def publish_one(self, tenant: str, name: str, worker: str) -> None:
        self.reserve(tenant, name, worker)
        entry = self.entries.get((tenant, name))
        if entry is not None and entry.state == "reserved":
            assert self.do(self.act_as(entry.worker).commit(entry.reservation)).failure is None
            entry.state = "live"

    @rule(tenant=TENANTS, name=NAMES, worker=WORKERS, request=st.sampled_from(["x", "y"]))
    def lease(self, tenant: str, name: str, worker: str, request: str) -> None:
        reply = self.do(
            self.act_as(worker).lease(self.bench.tenants[tenant], name, request_id=request, ttl_s=LEASE_S)
        )
        entry = self.entries.get((tenant, name))
        if entry is None or entry.state in ("reserved", "rows"):
            assert reply.reason == "gone"
        elif entry.state == "evicting":
            assert reply.reason == "evicting"
        elif entry.worker != worker:
            assert reply.reason == "not_held_here"
        else:
            assert reply.reason == "granted"
            entry.leases[reply.lease_id] = self.now + LEASE_S

    @rule(tenant=TENANTS, name=NAMES)
    def release(self, tenant: str, name: str) -> None:
        entry = self.entries.get((tenant, name))
        if entry is not None and entry.leases:
            lease_id, _ = entry.leases.popitem()
            self.do(self.bench.handlers.answer(Release(lease_id=lease_id)))

    @rule(names=st.sets(NAMES, min_size=1), worker=WORKERS)
    def withdraw_alone(self, names: set[str], worker: str) -> None:
        self.withdraw(names, worker)

    def withdraw(self, names: set[str], worker: str) -> None:
        """Of both tenants at once: their roots differ, the names' keys do not (which no real chain can do)."""
        reply = self.do(self.act_as(worker).withdraw(*sorted(names)))
        refused = {
            key(name)
            for (_, name), entry in self.entries.items()
            if name in names
            and entry.worker == worker
            and (entry.state == "reserved" or (entry.state == "live" and self.leased(entry)))
        }
        for (_, name), entry in self.entries.items():
            if (
                key(name) not in refused
                and name in names
                and entry.worker == worker
                and entry.state == "live"
            ):
                entry.state = "evicting"
        assert set(reply.refused) == refused
        assert set(reply.withdrawn) == set(map(key, names)) - refused

    @rule(names=st.sets(NAMES, min_size=1), worker=WORKERS)
    def freed_alone(self, names: set[str], worker: str) -> None:
        self.freed(names, worker)

    def freed(self, names: set[str], worker: str) -> None:
        assert self.do(self.act_as(worker).freed(*sorted(names))).failure is None
        for tenant in ("one", "two"):
            for name in sorted(names, key=lambda name: -POSITION[name]):
                entry = self.entries.get((tenant, name))
                if entry is not None and entry.worker == worker and entry.state == "evicting":
                    self.drop(tenant, name)

    @rule(seconds=st.sampled_from([1, 31, 61]))
    def time_passes(self, seconds: int) -> None:
        self.bench.clock.advance(seconds)
        self.now += seconds
        for worker in self.epochs:
            self.do(self._beat(worker))
        self.do(self.bench.sweeper.sweep(hearing=True))
        for (tenant, name), entry in sorted(self.entries.items(), key=lambda item: item[1].until):
            if entry.state == "reserved" and entry.until <= self.now:
                self.drop(tenant, name)

    @precondition(lambda self: len(self.entries) > 3)
    @rule(worker=WORKERS)
    def worker_restarts(self, worker: str) -> None:
        self.epochs[worker] += 1
        assert self.do(self._beat(worker)) is True
        self.do(self.bench.sweeper.drop_orphans())
        self.entries = {name: entry for name, entry in self.entries.items() if entry.worker != worker}

    @invariant()
    def books_balance_and_equal_the_model(self) -> None:
        balances = self.do(self.bench.balanced())
        assert balances == {name: self.used(name) for name in ("one", "two")}
        assert all(used <= QUOTA for used in balances.values())

    @invariant()
    def lookups_see_what_is_live(self) -> None:
        for tenant in ("one", "two"):
            reply = self.do(self.bench.lookup(self.bench.tenants[tenant], *PARENT))
            live = [
                name
                for (owner, name), entry in self.entries.items()
                if owner == tenant and entry.state == "live"
            ]
            expected = max(live, key=POSITION.__getitem__, default=None)
            assert (reply.entry and reply.entry.key) == (expected and key(expected))


def test_fr_88_fr_91_fr_92_books_balance_after_any_sequence(database_url: str) -> None:
    with asyncio.Runner() as runner:
        context = bench_on(database_url, reservation_ttl_s=TTL)
        Books.runner, Books.bench = runner, runner.run(context.__aenter__())
        try:
            run_state_machine_as_test(
                Books,
                settings=settings(
                    deadline=None,
                    max_examples=20,
                    stateful_step_count=40,
                    # No shrinking: on a real database it takes longer than the test may.
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(context.__aexit__(None, None, None))
