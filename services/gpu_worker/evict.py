"""Giving entries back: the broker lets them go, the engine frees them, the broker refunds them (C5).

    Withdraw -> the broker forgets them for lookups, refuses leased ones
    Engine.evict -> the bytes are free; one in use by now lingers, and is tried again
    Freed -> the ledger is refunded

The ledger may be above the real bytes, never below. So when the broker is away, the engine still frees what it must, and
the news is owed and told later; until then the broker charges too much.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Final

from services.gpu_worker.book import EntryBook
from services.gpu_worker.broker import BrokerRefused
from services.gpu_worker.core import Core
from shared.errors import Unavailable
from shared.protocol.messages import Done, Freed, Withdraw, WithdrawReply
from shared.telemetry import Parent

log = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_RETRY_NS: Final = 1_000_000_000


class Evictor:
    """Serial: one eviction at a time, so that two of them never choose the same entries."""

    def __init__(self, core: Core, book: EntryBook) -> None:
        self._core = core
        self._book = book
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self._lingering: set[bytes] = set()
        """To be evicted, but in use by the engine when it was asked."""
        self._owed: dict[bytes, bool] = {}
        """Freed and not yet told; the value says whether the broker let it go before."""
        self._retry_ns = 0

    @property
    def owed(self) -> int:
        """Entries that the broker still charges though they are gone."""
        return len(self._owed)

    def nudge(self) -> None:
        """The engine may want room."""
        self._wake.set()

    def published(self, key: bytes) -> None:
        """An entry of this key stands anew: what was owed of the old one must not reach the broker any more."""
        self._owed.pop(key, None)
        self._lingering.discard(key)

    async def free(self, keys: Sequence[bytes], *, reason: str, parent: Parent = None) -> int:
        """Free these entries if the broker lets them go. Returns how many gave something back.

        Raises:
            Unavailable, BrokerRefused: the broker did not answer the withdrawal; nothing was freed.
        """
        async with self._turn:
            reply = await self._withdraw(keys, parent)
            freed = await self._evict(reply.withdrawn, reason=reason, withdrawn=True)
            await self._settle(parent)
            return freed

    async def reclaim(self, keys: Sequence[bytes], *, reason: str) -> None:
        """Free these entries without asking, and owe the broker the news: it does not know them, or may not."""
        async with self._turn:
            await self._evict(keys, reason=reason, withdrawn=False)
            self._wake.set()

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
        async with self._turn:
            if self._owed and self._core.clock.monotonic_ns() >= self._retry_ns:
                await self._settle(None)
            if self._lingering:
                await self._evict(tuple(self._lingering), reason="lingering", withdrawn=True)
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
            log.warning("the broker is away: %d entries are evicted and owed to it", len(keys))
            await self._evict(keys, reason="pressure", withdrawn=False)
        else:
            await self._evict(free, reason="pressure", withdrawn=True)
            await self._settle(None)

    async def _withdraw(self, keys: Collection[bytes], parent: Parent) -> WithdrawReply:
        who = self._core.identity
        call = Withdraw(worker_id=who.worker_id, epoch=who.epoch, keys=tuple(keys))
        return await self._core.broker.ask(call, WithdrawReply, parent)

    async def _evict(self, keys: Sequence[bytes], *, reason: str, withdrawn: bool) -> int:
        """Ask the engine; what it frees is owed to the broker, what it keeps lingers."""
        if not keys:
            return 0
        evicted = await self._core.host.call(lambda engine: engine.evict(keys))
        self._book.evict(evicted)
        freed = {*evicted.gone, *evicted.stateless}
        self._lingering -= set(keys)
        for key in keys:
            if key in self._book and key not in freed:
                self._lingering.add(key)
            else:
                self._owed[key] = withdrawn or self._owed.get(key, False)
        self._core.metrics.evictions.labels(reason).inc(len(freed))
        return len(freed)

    async def _settle(self, parent: Parent) -> None:
        """Tell the broker what is freed; what it cannot be told now stays owed."""
        due = dict(self._owed)
        if not due:
            return
        who = self._core.identity
        self._retry_ns = self._core.clock.monotonic_ns() + _RETRY_NS
        try:
            unasked = [key for key, withdrawn in due.items() if not withdrawn]
            if unasked:
                await self._withdraw(unasked, parent)
            call = Freed(worker_id=who.worker_id, epoch=who.epoch, keys=tuple(due))
            await self._core.broker.ask(call, Done, parent)
        except (Unavailable, BrokerRefused) as error:
            log.warning("the broker could not be told of %d freed entries (%s)", len(due), error.code)
        else:
            for key in due:
                self._owed.pop(key, None)
