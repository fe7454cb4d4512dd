"""Giving entries back: the broker lets them go, the engine frees them, the broker refunds them (C5).

    Withdraw -> the broker forgets them for lookups, refuses leased ones
    Engine.evict -> the bytes are free; one in use by now lingers, and is tried again
    Freed -> the ledger is refunded

The ledger may be above the real bytes, never below. So when the broker is away, the engine still frees what it must, and
the news is owed and told later (`debts`); until then the broker charges too much.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from services.gpu_worker.book import EntryBook
from services.gpu_worker.broker import BrokerRefused
from services.gpu_worker.core import Core
from services.gpu_worker.debts import Debts
from shared.errors import Unavailable
from shared.outage import Outage
from shared.protocol.messages import Reserve, Withdraw, WithdrawReply
from shared.telemetry import Parent

log = logging.getLogger(__name__)

_TICK_S: Final = 0.25


class Evictor:
    """One change at a time, an eviction or a publication, and each takes its `turn`: two evictions never choose the same
    entries, and news of an old entry never reach the broker when a new one of its key stands."""

    def __init__(self, core: Core, book: EntryBook) -> None:
        self._core = core
        self._book = book
        self.turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self._lingering: dict[bytes, bool] = {}
        """To be evicted, but in use by the engine when it was asked; the value says whether the broker let it go."""
        self._debts = Debts(core)
        self._outage = Outage(log, "withdrawals", clock=core.clock)

    @property
    def owed(self) -> int:
        """Entries that the broker still charges though they are gone."""
        return len(self._debts)

    def nudge(self) -> None:
        """The engine may want room."""
        self._wake.set()

    def published(self, key: bytes) -> None:
        """An entry stands anew: what was meant for the old one must not happen to it."""
        self._lingering.pop(key, None)
        self._debts.forgive(key)

    async def settle(self, parent: Parent = None) -> bool:
        """In one's turn: pay what is owed. False when the broker is away.

        A reservation that comes after is judged by books in which everything is that this worker has done before.
        """
        return await self._debts.pay(parent)

    def forgo(self, call: Reserve) -> None:
        """A reservation that stands, or may stand, comes to nothing."""
        self._debts.reserved(call)
        self._wake.set()

    async def free(self, keys: Sequence[bytes], *, reason: str, parent: Parent = None) -> int:
        """In one's turn: free these entries if the broker lets them go. Returns how many gave something back.

        Raises:
            Unavailable, BrokerRefused: the broker did not answer the withdrawal; nothing was freed.
        """
        reply = await self._withdraw(keys, parent)
        freed = await self._evict(dict.fromkeys(reply.withdrawn, True), reason=reason)
        await self._debts.pay(parent)
        return freed

    async def reclaim(self, keys: Sequence[bytes], *, reason: str) -> None:
        """Free these entries without asking, and owe the broker the news: it does not know them, or may not."""
        async with self.turn:
            await self._evict(dict.fromkeys(keys, False), reason=reason)
            self._wake.set()

    async def start_over(self) -> int:
        """The broker declared this epoch over and charges nothing of it: begin another, and free everything, what is in
        use when its use ends. Returns how many entries gave something back now."""
        async with self.turn:
            self._core.identity.begin_epoch()
            freed = await self._evict(dict.fromkeys(self._book.deepest_first(), True), reason="epoch")
            self._debts.clear()
            return freed

    async def run(self) -> None:
        """Keep room in the pools, and pay what is owed. Ends by cancellation alone."""
        while True:
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass  # the engine's pressure is looked at anyway: it may wait without telling anything
            self._wake.clear()
            await self.relieve()

    async def relieve(self) -> None:
        """One turn of `run`: pay, evict what lingered, then what the engine's pressure asks for."""
        async with self.turn:
            if self._debts.due:
                await self._debts.pay(None)
            if self._lingering:
                await self._evict(dict(self._lingering), reason="lingering")
            pressure = self._core.host.pressure
            if not pressure:
                return
            keys = await self._core.host.call(
                lambda engine: engine.eviction_candidates(pressure.blocks, pressure.snapshots)
            )
            if keys:
                await self._make_room(keys)

    async def _make_room(self, keys: Sequence[bytes]) -> None:
        try:
            free = (await self._withdraw(keys, None)).withdrawn
        except (Unavailable, BrokerRefused):
            self._outage.failed("what is evicted meanwhile is owed to the broker")
            await self._evict(dict.fromkeys(keys, False), reason="pressure")
        else:
            self._outage.worked()
            await self._evict(dict.fromkeys(free, True), reason="pressure")
            await self._debts.pay(None)

    async def _withdraw(self, keys: Collection[bytes], parent: Parent) -> WithdrawReply:
        who = self._core.identity
        call = Withdraw(worker_id=who.worker_id, epoch=who.epoch, keys=tuple(keys))
        return await self._core.broker.ask(call, WithdrawReply, parent)

    async def _evict(self, keys: Mapping[bytes, bool], *, reason: str) -> int:
        """Ask the engine; what it frees is owed to the broker, what it keeps lingers. The values as in `_lingering`."""
        if not keys:
            return 0
        evicted = await self._core.host.call(lambda engine: engine.evict(tuple(keys)))
        self._book.evict(evicted)
        freed = {*evicted.gone, *evicted.stateless}
        for key, withdrawn in keys.items():
            self._lingering.pop(key, None)
            if key in self._book and key not in freed:
                self._lingering[key] = withdrawn
            else:
                self._debts.freed(key, withdrawn=withdrawn)
        self._core.metrics.evictions.labels(reason).inc(len(freed))
        return len(freed)
