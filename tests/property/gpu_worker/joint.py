"""The worker's cache side and the broker together, in every order of their steps.

Real: pools and prefix tree, publisher, evictor, book, the broker on Postgres. Played by dice: primes (without a model),
which waiting call goes on next, whose question or answer is lost, how long a moment is. So a seed is a schedule, and a
failure can be run again.

The worker's entries are what counts: the broker must charge exactly them, key by key, once nothing is under way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from kernels.checksum import Checksum, checksum
from services.cache_broker.audit import compare, read_charged
from services.cache_broker.models import Quota, Tenant
from services.gpu_worker.book import EntryBook
from services.gpu_worker.broker import BrokerClient, BrokerRefused
from services.gpu_worker.config import WorkerSettings
from services.gpu_worker.core import Core, Identity
from services.gpu_worker.engine.cache.captures import CaptureFailed
from services.gpu_worker.engine.cache.entry import Capture, Entry
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.cache.offload import HostTier
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.events import Captured
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.stats import Pressure
from services.gpu_worker.evict import Evictor
from services.gpu_worker.host import EngineHost
from services.gpu_worker.metrics import WorkerMetrics
from services.gpu_worker.publish import Owner, Publisher
from shared import telemetry
from shared.clock import ManualClock
from shared.errors import Unavailable
from shared.protocol import chain
from shared.protocol.messages import BrokerCall, Commit, HeldEntry, Reserve
from shared.storing import StoreHealth
from tests.engine_kit import request
from tests.integration.cache_broker.bench import FINGERPRINT, Bench, namespace

T = TypeVar("T")

BLOCK_BYTES, STATE_BYTES = 12, 60
PRICES = Prices(token_flops=1, pair_flops=1, block_bytes=BLOCK_BYTES, state_bytes=STATE_BYTES)
HOST_BYTES = 4 * STATE_BYTES + 12 * BLOCK_BYTES
QUOTA = 560
TTL = 60
EPOCH = ManualClock().now()
HIDDEN = torch.zeros(1)
PIECES = [tuple(random.Random(seed).randrange(3, 400) for _ in range(BLOCK_ROWS)) for seed in range(3)]


class NoStates:
    """Recurrent states and rows that hold nothing, and weigh what the broker is told."""

    def reset(self, slot: int) -> None: ...

    def take_snapshot(self, slot: int, snapshot: int) -> None: ...

    def restore(self, snapshot: int, slot: int) -> None: ...

    def read_block(self, block: int) -> torch.Tensor:
        return torch.zeros(PRICES.block_bytes // 4)

    def write_block(self, block: int, rows: torch.Tensor) -> None: ...

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None: ...

    def sums_of(self, blocks: Sequence[int]) -> list[Checksum]:
        return [checksum(self.read_block(block)) for block in blocks]

    def read_snapshot(self, snapshot: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(PRICES.state_bytes // 4 - len(HIDDEN)), 0

    def write_snapshot(self, snapshot: int, values: torch.Tensor, position: int) -> None: ...


@dataclass(eq=False)
class Waiting:
    """A call to the engine or to the broker that goes on when the dice say so."""

    call: Callable[[Any], Any] | BrokerCall
    answer: asyncio.Future[Any]


@dataclass
class Calls:
    """Stands in for the engine's host and the broker's client: every call waits."""

    waiting: list[Waiting] = field(default_factory=list)
    pressure: Pressure = field(default_factory=lambda: Pressure(blocks=0, snapshots=0))

    async def call(self, command: Callable[[Any], T], *, urgent: bool = False) -> T:
        return cast("T", await self._wait(command))

    async def ask(self, call: BrokerCall, reply: type[T], parent: object = None) -> T:
        return cast("T", await self._wait(call))

    async def _wait(self, call: Any) -> Any:
        waiting = Waiting(call, asyncio.get_running_loop().create_future())
        self.waiting.append(waiting)
        return await waiting.answer


class CacheSide:
    """What the worker asks of the engine, for the cache alone."""

    def __init__(self, host_bytes: int) -> None:
        memory = NoStates()
        self.cache = CacheManager(
            num_blocks=40,
            num_slots=4,
            num_snapshots=10,
            max_pending=6,
            states=memory,
            tier=HostTier(host_bytes, memory),
            prices=PRICES,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, {"eviction_candidates": "candidates"}.get(name, name))


def captured(capture: Capture) -> Captured:
    """As the engine announces it."""
    return Captured(
        capture_id=capture.capture_id,
        request_id=capture.request_id,
        key=capture.entry.key,
        parent_key=capture.parent.key if capture.parent else None,
        splits_key=capture.splits.key if capture.splits else None,
        position=capture.entry.position,
        state_bytes=STATE_BYTES,
        kv_bytes=capture.kv_blocks * BLOCK_BYTES,
        end_ns=0,
    )


class Joint:
    """One worker of one tenant, and the broker."""

    def __init__(self, bench: Bench, dice: random.Random, *, faults: bool, host_bytes: int = 0) -> None:
        self.bench, self.dice, self.faults = bench, dice, faults
        self.reached: set[str] = set()
        self.steps: list[str] = []
        self.calls, self.side = Calls(), CacheSide(host_bytes)
        tele = telemetry.build("worker", None)
        self.metrics = WorkerMetrics(tele.registry)
        core = Core(
            settings=WorkerSettings(worker_id="w1"),
            identity=Identity(worker_id="w1", epoch="e1", model="m", fingerprint=FINGERPRINT),
            transport=cast("Any", None),
            telemetry=tele,
            host=cast("EngineHost", self.calls),
            broker=cast("BrokerClient", self.calls),
            metrics=self.metrics,
            storing=StoreHealth(bench.clock, "the journal", hold_s=30),
            grammars=cast("Any", None),
            clock=bench.clock,
            max_drafts=0,
        )
        self.book = EntryBook()
        self.evictor = Evictor(core, self.book)
        self.publisher = Publisher(core, self.book, self.evictor)
        self.primes: list[Iterator[None]] = []
        self.relief: asyncio.Task[None] | None = None
        self.count = 0
        self.late = False

    async def begin(self, tenant: str) -> None:
        self.space, self.tenant = namespace(tenant), tenant
        await self.bench.database.run(lambda connection: _fixed_tenant(connection, tenant))
        self.root = chain.root(self.space)
        self.task = asyncio.create_task(self.publisher.run())

    async def end(self) -> None:
        self.task.cancel()
        if self.relief is not None:
            self.relief.cancel()
        await asyncio.gather(self.task, *([self.relief] if self.relief else []), return_exceptions=True)

    # ---- steps -----------------------------------------------------------------------------------------------------

    async def step(self) -> None:
        """One random action, and what holds at any moment."""
        actions = {self.go_on: 10, self.prime: 3, self.open: 2, self.relieve: 1, self.settle: 0.3}
        if self.faults:
            actions[self.time_passes] = 1.5
        if self.side.cache.tier.budget:
            actions |= {self.spill: 2, self.change_a_copy: 0.5}
        action = self.dice.choices(list(actions), list(actions.values()))[0]
        self.steps.append(action.__name__)
        self.steps[-1] += f"({await action() or ''})"
        await self.breathe()
        await self.check_charged()

    async def breathe(self) -> None:
        """Let the tasks run to their next call."""
        for _ in range(12):
            await asyncio.sleep(0)
        if self.task.done():
            self.task.result()
        if self.relief is not None and self.relief.done():
            self.relief.result()
            self.relief = None

    async def open(self) -> str:
        """A request comes: a path over three pieces with a short tail, so that prefixes are shared often."""
        path = [self.dice.randrange(3) for _ in range(self.dice.randint(1, 5))]
        if len(self.primes) < 3:
            self.count += 1
            self.primes.append(self._prime(f"r{self.count}", path))
        return "".join(map(str, path))

    def _prime(self, name: str, path: list[int]) -> Iterator[None]:
        tokens = [token for piece in path for token in PIECES[piece]] + [1] * self.dice.randint(0, 2)
        capture_at = self.dice.choice([None, 64, 128, 192])
        item = request(tokens, name, root=self.root, max_tokens=4, capture_at=capture_at)
        cache, sequence = self.side.cache, SequenceState.host_only()
        if self.dice.random() < 0.8:
            cache.lookup(name, item.root, item.tokens, item.chain)
        yield
        if cache.fresh_blocks(item) > cache.blocks.free or not cache.slots.free:
            cache.drop_hit(name)
            return
        if cache.bring_back(name) is not None:
            self.reached.add("missed")
        if cache.admit(item, sequence) is None:
            return
        checkpoint = len(tokens) // BLOCK_ROWS * BLOCK_ROWS
        for position in cache.boundaries(item, sequence.seq_len, capture_at, checkpoint):
            sequence.commit(item.tokens[sequence.seq_len : position])
            try:
                capture = cache.capture(item, sequence, position, HIDDEN)
            except CaptureFailed:
                capture = None
            if capture is not None:
                self._offer(capture)
            yield
        sequence.guard.release()

    def _offer(self, capture: Capture) -> None:
        news = captured(capture)
        kind = "split" if news.splits_key else "rows" if news.kv_bytes else "revival"
        self.reached.add(f"captured {kind}")
        orphan = self.dice.random() < 0.05
        owner = Owner(request_id=news.request_id, namespace=self.space, root=self.root, parent=None)
        self.publisher.offer(news, None if orphan else owner)

    async def prime(self) -> None:
        """A prime goes to its next boundary."""
        if self.primes:
            prime = self.dice.choice(self.primes)
            if next(prime, self) is self:
                self.primes.remove(prime)

    async def relieve(self) -> None:
        """The pools want room."""
        wanted = self.dice.choice([(0, 0), (1, 0), (4, 0), (0, 1), (3, 2)])
        self.calls.pressure = Pressure(blocks=wanted[0], snapshots=wanted[1], ruined=self.side.cache.ruined)
        if self.relief is None:
            self.relief = asyncio.create_task(self.evictor.relieve())

    async def spill(self) -> None:
        """What nobody uses gives way to the host tier; the broker is not told."""
        before = self.side.cache.tier.taken
        self.side.cache.make_room(self.dice.randint(0, 40), self.dice.randint(0, 10))
        if self.side.cache.tier.taken > before:
            self.reached.add("spilled")

    async def change_a_copy(self) -> None:
        """Host memory changes: whoever comes for it must miss, and the entry must go from both sides."""
        tree = self.side.cache.tree
        copies = [node.host for node in tree.nodes() if node.host is not None]
        copies += [entry.host for entry in tree.entries() if entry.host is not None]
        if copies:
            self.dice.choice(copies).values[-1] += 1.0

    async def time_passes(self) -> str:
        seconds = self.dice.choices([0.5, 1.5, 3, TTL + 1], [3, 3, 6, 1])[0]
        self.late |= seconds > TTL
        await self._advance(seconds)
        return str(seconds)

    async def _advance(self, seconds: float) -> None:
        self.bench.clock.advance(seconds)
        await self.bench.sweeper.sweep(hearing=False)

    async def go_on(self) -> str:
        """One of the waiting calls happens."""
        if not self.calls.waiting:
            return ""
        waiting = self.dice.choice(self.calls.waiting)
        self.calls.waiting.remove(waiting)
        if callable(waiting.call):
            waiting.answer.set_result(waiting.call(self.side))
            return "engine"
        call, name = waiting.call, type(waiting.call).__name__
        fate = self._fate(call)
        if fate != "question lost":
            reply = await self.bench.handlers.answer(call)
        if fate != "fine":
            self._note_loss(call, fate)
            waiting.answer.set_exception(Unavailable(fate))
        elif reply.failure is not None:
            waiting.answer.set_exception(BrokerRefused(reply.failure))
            return f"{name}: {reply.failure.code}"
        else:
            waiting.answer.set_result(reply)
        return f"{name}: {getattr(reply, 'decision', '') if fate == 'fine' else fate}"

    def _fate(self, call: BrokerCall) -> str:
        """Splits and commits are lost more often: what they leave behind is the harder to clear up."""
        if not self.faults:
            return "fine"
        fragile = isinstance(call, Commit) or (isinstance(call, Reserve) and call.splits is not None)
        return self.dice.choices(["fine", "question lost", "answer lost"], [6 if fragile else 25, 1, 1])[0]

    def _note_loss(self, call: BrokerCall, fate: str) -> None:
        self.reached.add(f"{type(call).__name__} {fate}")
        if isinstance(call, Reserve) and call.splits is not None:
            self.reached.add(f"split {fate}")

    def outcomes(self) -> set[str]:
        """What became of captures, and why entries were evicted."""
        return {
            "_".join(sample.labels.values())
            for counter in (self.metrics.captures, self.metrics.evictions)
            for sample in next(iter(counter.collect())).samples
            if sample.value and sample.name.endswith("_total")
        }

    # ---- what must hold --------------------------------------------------------------------------------------------

    def real(self) -> dict[bytes, tuple[int, int, bytes | None]]:
        """Bytes of state and rows, and the parent, of every entry that the worker keeps for lookups."""
        return {entry.key: _facts(entry) for entry in self.side.cache.tree.entries() if entry.published}

    async def check_charged(self) -> None:
        """Nothing is kept that is not charged; a reservation that ran out in mid-flight is the one exception."""
        used = (await self.bench.balanced())[self.tenant]
        real = sum(state + rows for state, rows, _ in self.real().values())
        real += sum(map(self._passing, self.side.cache._captures.pending.values())) * BLOCK_BYTES
        assert self.late or real <= used, f"{real} bytes are kept, {used} charged"

    def _passing(self, capture: Capture) -> int:
        """Blocks of a pending capture that are still charged to the entry that it splits."""
        heir, standing = (
            capture.splits,
            {other.entry: other for other in self.side.cache._captures.pending.values()},
        )
        while heir is not None and not heir.published:
            heir = standing[heir].splits
        return capture.entry.blocks if heir is not None and not capture.entry.published else 0

    async def settle(self) -> None:
        """Let everything end, the network whole again, and compare key by key."""
        whole, self.faults = self.faults, False
        for prime in self.primes:
            while next(prime, self) is not self:
                await self.breathe()
        self.primes.clear()
        self.calls.pressure = Pressure(blocks=0, snapshots=0)
        for turn in range(200):
            while self.calls.waiting:
                await self.go_on()
                await self.breathe()
            if not self._busy() and turn > 2:
                break
            await self._advance(1.1)
            await self.relieve()
            self.calls.pressure = Pressure(blocks=0, snapshots=0, ruined=self.side.cache.ruined)
            await self.breathe()
        assert not self._busy()
        self.faults = whole
        await self._compare()
        await self._advance(TTL + 1)
        self.late = False
        await self._compare(exactly=True)

    def _busy(self) -> bool:
        return bool(
            self.calls.waiting
            or self.relief
            or self.side.cache.pending
            or self.side.cache.ruined
            or self.evictor.owed
            or self.publisher._open
        )

    async def _compare(self, *, exactly: bool = False) -> None:
        self.side.cache.check([])
        real = self.real()
        held = self.book.page(skip=0, limit=10_000)
        assert {entry.key: (entry.state_bytes, entry.kv_bytes) for entry in held} == {
            key: facts[:2] for key, facts in real.items()
        }
        charged = await self.bench.database.run(lambda connection: read_charged(connection, "w1"))
        mine = {identity: book for identity, book in charged.items() if identity[0] == self.root}
        real_entries = [
            HeldEntry(root=self.root, key=key, state_bytes=state, kv_bytes=rows)
            for key, (state, rows, _) in real.items()
        ]
        wrong = compare("w1", mine, real_entries)
        assert wrong == [], f"{wrong}, of {real}"
        if exactly:
            assert not any(book.reserved for book in mine.values())
            rows = await self.bench.rows(
                f"SELECT key, parent FROM entries WHERE root = '\\x{self.root.hex()}'"
            )
            assert {row.key: row.parent for row in rows} == {key: facts[2] for key, facts in real.items()}


async def _fixed_tenant(connection: AsyncConnection, name: str) -> None:
    """With an id that is no accident, so that a seed gives the same chain keys every time."""
    await connection.execute(insert(Tenant).values(id=name, name=name, created=EPOCH))
    await connection.execute(insert(Quota).values(tenant=name, cache_bytes=QUOTA, used_bytes=0))


def _facts(entry: Entry) -> tuple[int, int, bytes | None]:
    state = STATE_BYTES if entry.kept else 0
    return state, entry.blocks * BLOCK_BYTES, entry.parent.key if entry.parent else None
