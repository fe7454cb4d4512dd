"""When the broker declared this worker's epoch over though it lives: a paused machine, a partition, a mix-up of ids.

    epoch_gone, or a long silence -> ask -> current: nothing was lost
                                         -> over: free every entry, begin a new epoch, tell it, ask until it is known

The broker has dropped and refunded what the old epoch held, so until the new one begins, entries here are bytes that
nobody is charged for, and every capture is refused. Requests go on meanwhile, by the cold path (C3).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Literal

from services.gpu_worker.broker import BrokerRefused
from services.gpu_worker.core import Core
from services.gpu_worker.evict import Evictor
from shared.errors import Unavailable
from shared.protocol.messages import Withdraw, WithdrawReply

log = logging.getLogger(__name__)

_PAUSES_S: Final = (0.05, 0.2, 0.5, 1.0)
"""How long a heartbeat may take to the broker's books; after the last, an epoch that is not known is over."""


class Epochs:
    """Belongs to the event loop; `run` is its one task."""

    def __init__(self, core: Core, evictor: Evictor, *, beat: Callable[[], Awaitable[None]]) -> None:
        """`beat` sends a heartbeat, which is how the broker learns of an epoch."""
        self._core = core
        self._evictor = evictor
        self._beat = beat
        self._doubted = asyncio.Event()
        core.broker.on_epoch_gone = self.doubt

    def doubt(self) -> None:
        """The epoch may be over."""
        self._doubted.set()

    async def run(self) -> None:
        """Settle every doubt. Ends by cancellation alone."""
        while True:
            await self._doubted.wait()
            await self.settle()
            self._doubted.clear()  # after: the asking itself raises doubts

    async def settle(self) -> None:
        """Until the broker knows this worker's epoch, or a new one."""
        while not await self._known():
            over = self._core.identity.epoch
            freed = await self._evictor.start_over()
            self._core.metrics.epochs.inc()
            log.warning("the broker declared epoch %s over: %d entries are given back", over, freed)

    async def _known(self) -> bool:
        """Whether the broker knows the epoch; asked again while the broker is away or a heartbeat may be on its way."""
        pauses = iter(_PAUSES_S)
        while (answer := await self._ask()) != "known":
            pause = _PAUSES_S[-1] if answer == "away" else next(pauses, None)
            if pause is None:
                return False
            await self._beat()
            await asyncio.sleep(pause)
        return True

    async def _ask(self) -> Literal["known", "over", "away"]:
        who = self._core.identity
        try:
            await self._core.broker.ask(
                Withdraw(worker_id=who.worker_id, epoch=who.epoch, keys=()), WithdrawReply
            )
        except Unavailable:
            return "away"
        except BrokerRefused as refused:
            return "over" if refused.code == "epoch_gone" else "away"
        return "known"
