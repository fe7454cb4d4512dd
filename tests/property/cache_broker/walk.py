"""A model of the broker, and random walks that compare the two after every step.

Long random walks from a seed, not a Hypothesis rule machine: its runs are short and it does not get to where splits,
kept rows and revivals meet. Some steps are weighted for that. A failure names the seed and the steps.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import text

from services.cache_broker import presence
from shared.protocol.messages import Heartbeat, Release, Speculation
from tests.integration.cache_broker.bench import FINGERPRINT, Bench, key

QUOTA = 330
TTL = 60
LEASE_S = 30
# `m` lies below `a`: captured later, it splits the rows of `a`.
PARENT = {"m": None, "a": None, "b": "a", "c": "b", "d": "a", "e": None}
POSITION = {"m": 64, "a": 128, "b": 192, "c": 256, "d": 320, "e": 384}
STATE, KV, SPLIT_KV = 60, 40, 15
# Mostly one tenant and one worker, so that entries meet.
TENANTS = ("one", "one", "one", "two")
WORKERS = ("w1", "w1", "w1", "w2")
NAMES = tuple(PARENT)


@dataclass
class ModelEntry:
    """What the model knows of an entry."""

    worker: str
    state: str
    request: str
    reservation: str
    until: float
    parent: str | None
    kv: int
    splits: str | None
    leases: dict[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.kv + (0 if self.state == "rows" else STATE)


class Walk:
    """Two tenants, two workers, a forest of six entries each."""

    def __init__(self, runner: asyncio.Runner, bench: Bench, dice: random.Random) -> None:
        self.runner, self.bench, self.dice = runner, bench, dice
        self.reached: set[str] = set()
        self.entries: dict[tuple[str, str], ModelEntry] = {}
        self.leases: dict[str, str | None] = {}
        self.epochs = {"w1": 1, "w2": 1}
        self.silent: set[str] = set()
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

    def children(self, tenant: str, name: str) -> list[str]:
        return [
            child
            for (owner, child), entry in self.entries.items()
            if owner == tenant and entry.parent == name
        ]

    def used(self, tenant: str) -> int:
        return sum(entry.size for (owner, _), entry in self.entries.items() if owner == tenant)

    def drop(self, tenant: str, name: str) -> None:
        if self.children(tenant, name):
            self.reached.add("rows kept")
            self.entries[tenant, name].state = "rows"
            self.entries[tenant, name].leases.clear()
            return
        parent = self.entries.pop((tenant, name)).parent
        if parent is not None and self.entries[tenant, parent].state == "rows":
            self.reached.add(
                "rows gone with the last child" if not self.children(tenant, parent) else "rows stay"
            )
            self.drop(tenant, parent)

    def heal(self, tenant: str, name: str) -> bool:
        """Undo a split, as an abort does."""
        entry = self.entries[tenant, name]
        if entry.state != "reserved" or entry.splits is None or self.children(tenant, name) != [entry.splits]:
            return False
        self.reached.add("split undone")
        heir = self.entries[tenant, entry.splits]
        heir.parent, heir.kv = entry.parent, heir.kv + entry.kv
        del self.entries[tenant, name]
        return True

    def leased(self, entry: ModelEntry) -> bool:
        return any(end > self.now for end in entry.leases.values())

    def step(self) -> str:
        """One random action, then the invariants; what was done, for the report of a failure."""
        actions = {
            self.publish: 4, self.evict: 3, self.abort: 2, self.commit: 1, self.reserve: 2, self.lease: 3, self.cut: 2,
            self.release: 1, self.withdraw: 1, self.freed: 1, self.time_passes: 1,
        }  # fmt: skip
        action = self.dice.choices(list(actions), list(actions.values()))[0]
        if self.dice.random() < 0.03:
            action = self.dice.choice((self.worker_restarts, self.worker_falls_silent))
        arguments = self.arguments(action.__name__)
        if arguments is None:
            return "nothing"
        action(*arguments)
        self.check_books()
        self.check_lookups()
        return f"{action.__name__}{arguments}"

    def arguments(self, action: str) -> tuple[Any, ...] | None:
        """Random ones; None when there is nothing to act on."""
        pick = self.dice.choice
        tenant, name, worker = pick(TENANTS), pick(NAMES), pick(WORKERS)
        names = tuple(sorted(self.dice.sample(NAMES, self.dice.randint(1, 3))))
        match action:
            case "evict" | "abort" | "commit" | "release":
                return pick(sorted(self.entries)) if self.entries else None
            case "publish":
                return tenant, pick(self.publishable(tenant))
            case "cut":
                return (tenant,)
            case "lease":
                return tenant, name, worker, pick(("x", "y"))
            case "withdraw" | "freed":
                return names, worker
            case "time_passes":
                return (pick((1, 31, 61)),)
            case "worker_restarts" | "worker_falls_silent":
                return (worker,)
            case _:
                return tenant, name, worker

    def reserve(self, tenant: str, name: str, worker: str) -> None:
        self.requests += 1
        request = f"r{self.requests}"
        parent, splits, rows = self.ground(tenant, name, worker)
        reply = self.do(
            self.act_as(worker).reserve(
                self.bench.tenants[tenant],
                name,
                request_id=request,
                position=POSITION[name],
                parent=None if parent is None else key(parent),
                parent_position=0 if parent is None else POSITION[parent],
                splits=None if splits is None else key(splits),
                kv_bytes=rows,
            )
        )
        known = self.entries.get((tenant, name))
        before = copy.deepcopy(self.entries)
        gives_way = known is not None and known.worker != worker and known.worker in self.silent
        if known is not None and gives_way:
            if reply.failure is not None:
                assert reply.failure.code == "parent_gone"
                return  # rolled back: nobody gave way
            self.reached.add("a silent worker's entry gave way")
            self._begin_epoch(known.worker)  # as it does when it is told
            known = None
        if known is not None and known.worker == worker and known.state == "evicting":
            self.drop(tenant, name)
            known = self.entries.get((tenant, name))
        revive = known is not None and known.worker == worker and known.state == "rows"
        if known is not None and not revive:
            assert reply.decision == "exists"
            self.reached.add("exists")
            return
        below = None if parent is None else self.entries.get((tenant, parent))
        if parent is not None and (below is None or below.worker != worker):
            assert reply.failure is not None
            assert reply.failure.code == "parent_gone"
            self.reached.add("parent gone")
            self.entries = before  # rolled back, though it had been dropped as freed
            return
        size = STATE if revive or splits is not None else STATE + rows
        if self.used(tenant) + size > QUOTA:
            assert reply.decision in ("evict", "skips_pinned")
            self.reached.add(reply.decision)
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
        if known is not None:
            self.reached.add("state came back")
            parent, rows, splits = known.parent, known.kv, None
        elif splits is not None:
            self.reached.add("split")
            heir = self.entries[tenant, splits]
            heir.parent, heir.kv = name, heir.kv - rows
        self.entries[tenant, name] = ModelEntry(
            worker,
            "reserved",
            request,
            reply.reservation_id,
            self.now + TTL,
            parent=parent,
            kv=rows,
            splits=splits,
        )

    def ground(self, tenant: str, name: str, worker: str) -> tuple[str | None, str | None, int]:
        """Parent, entry to split and bytes of rows of a new entry, as a worker's tree tells them."""
        mine = {
            other
            for (owner, other), entry in self.entries.items()
            if owner == tenant and entry.worker == worker
        }
        if name == "m":
            splits = "m" not in mine and "a" in mine and self.entries[tenant, "a"].parent is None
            return None, "a" if splits else None, SPLIT_KV
        if name == "a" and "m" in mine:
            return "m", None, KV - SPLIT_KV
        return PARENT[name], None, KV

    def commit(self, tenant: str, name: str) -> None:
        entry = self.entries[tenant, name]
        reply = self.do(self.act_as(entry.worker).commit(entry.reservation))
        if entry.state in ("reserved", "live"):
            assert reply.failure is None
            entry.state = "live"
        else:
            assert reply.failure.code == "reservation_gone"

    def abort(self, tenant: str, name: str) -> None:
        entry = self.entries[tenant, name]
        assert self.do(self.act_as(entry.worker).abort(entry.reservation)).failure is None
        if entry.state in ("reserved", "live") and not self.heal(tenant, name):
            self.drop(tenant, name)

    def evict(self, tenant: str, name: str) -> None:
        """What a holder does with an entry of its own."""
        worker = self.entries[tenant, name].worker
        self.withdraw((name,), worker)
        self.freed((name,), worker)

    def publishable(self, tenant: str) -> list[str]:
        """Entries whose parent is there."""
        return [name for name, parent in PARENT.items() if parent is None or (tenant, parent) in self.entries]

    def publish(self, tenant: str, name: str) -> None:
        """What a worker does: reserve on what it holds, then commit, mostly."""
        parent = self.entries.get((tenant, PARENT[name] or ""))
        self.reserve(tenant, name, "w1" if parent is None else parent.worker)
        entry = self.entries.get((tenant, name))
        if entry is not None and entry.state == "reserved" and self.dice.random() < 0.6:
            self.commit(tenant, name)

    def cut(self, tenant: str) -> None:
        """A branch point below `a`, and half of the time a change of mind."""
        held = self.entries.get((tenant, "a"))
        self.reserve(tenant, "m", "w1" if held is None else held.worker)
        if (tenant, "m") in self.entries and self.dice.random() < 0.5:
            self.abort(tenant, "m")

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
            self.reached.add("leased")
            entry.leases[reply.lease_id] = self.now + LEASE_S

    def release(self, tenant: str, name: str) -> None:
        entry = self.entries[tenant, name]
        if entry.leases:
            lease_id, _ = entry.leases.popitem()
            self.do(self.bench.handlers.answer(Release(lease_id=lease_id)))

    def withdraw(self, names: tuple[str, ...], worker: str) -> None:
        """Of both tenants at once: their roots differ, the names' keys do not (which no real chain can do)."""
        reply = self.do(self.act_as(worker).withdraw(*names))
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
        self.reached |= {"withdrawal refused"} if refused else set()
        assert set(reply.withdrawn) == set(map(key, names)) - refused

    def freed(self, names: tuple[str, ...], worker: str) -> None:
        assert self.do(self.act_as(worker).freed(*names)).failure is None
        for tenant in ("one", "two"):
            for name in sorted(names, key=lambda name: -POSITION[name]):
                entry = self.entries.get((tenant, name))
                if entry is not None and entry.worker == worker and entry.state == "evicting":
                    self.drop(tenant, name)

    def time_passes(self, seconds: int) -> None:
        self.bench.clock.advance(seconds)
        self.now += seconds
        for worker in self.epochs:
            self.do(self._beat(worker))
        self.silent.clear()
        self.do(self.bench.sweeper.sweep(hearing=True))
        for (tenant, name), entry in sorted(self.entries.items(), key=lambda item: item[1].until):
            if entry.state == "reserved" and entry.until <= self.now:
                self.reached.add("reservation expired")
                self.drop(tenant, name)

    def worker_restarts(self, worker: str) -> None:
        self.reached.add("worker restarted")
        self._begin_epoch(worker)

    def worker_falls_silent(self, worker: str) -> None:
        """The broker hears the other one alone, for longer than a worker may be silent; that one wants an entry of it."""
        for _ in range(6):
            self.bench.clock.advance(2)
            for other in self.epochs.keys() - {worker}:
                self.do(self._beat(other))
            self.bench.hearing.tick(heard=True)
        self.now += 12
        self.silent = {worker}
        theirs = sorted(place for place, entry in self.entries.items() if entry.worker == worker)
        if theirs:
            tenant, name = self.dice.choice(theirs)
            self.reserve(tenant, name, "w2" if worker == "w1" else "w1")

    def _begin_epoch(self, worker: str) -> None:
        """What is left of the old one is swept."""
        self.epochs[worker] += 1
        self.silent.discard(worker)
        assert self.do(self._beat(worker)) is True
        self.do(self.bench.sweeper.drop_orphans())
        self.entries = {place: entry for place, entry in self.entries.items() if entry.worker != worker}

    def check_books(self) -> None:
        balances = self.do(self.bench.balanced())
        assert balances == {name: self.used(name) for name in ("one", "two")}
        assert all(used <= QUOTA for used in balances.values())
        found = self.do(
            self.bench.rows(
                "SELECT t.name AS tenant, e.key, e.state, e.kv_bytes, e.parent FROM entries e "
                "JOIN tenants t ON t.id = e.tenant"
            )
        )
        assert {tuple(row) for row in found} == {
            (tenant, key(name), entry.state, entry.kv, entry.parent and key(entry.parent))
            for (tenant, name), entry in self.entries.items()
        }

    def check_lookups(self) -> None:
        for tenant in ("one", "two"):
            reply = self.do(self.bench.lookup(self.bench.tenants[tenant], *PARENT))
            live = [
                name
                for (owner, name), entry in self.entries.items()
                if owner == tenant and entry.state == "live" and entry.worker not in self.silent
            ]
            expected = max(live, key=POSITION.__getitem__, default=None)
            assert (reply.entry and reply.entry.key) == (expected and key(expected))
