"""What the broker has still to be told: entries that are free, and reservations whose answer was lost.

Until it is told, it charges too much, never too little. A key that it does not let go yet (leased, or reserved by a
commit whose answer was lost) stays owed and keeps nobody waiting.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from services.gpu_worker.broker import BrokerRefused
from services.gpu_worker.core import Core
from shared.errors import Unavailable
from shared.outage import Outage
from shared.protocol.messages import Abort, Done, Freed, Reserve, ReserveReply, Withdraw, WithdrawReply
from shared.telemetry import Parent

log = logging.getLogger(__name__)

_RETRY_NS: Final = 1_000_000_000


def unknown(error: Unavailable | BrokerRefused) -> bool:
    """Whether the call may have happened: no answer, or a broker that could not finish."""
    return isinstance(error, Unavailable) or error.status >= 500


class Debts:
    """Belongs to the evictor, which pays under its lock: nothing is told twice at once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._freed: dict[bytes, bool] = {}
        """The value says whether the broker let the key go before."""
        self._reserved: dict[bytes, Reserve] = {}
        self._due_ns = 0
        self._outage = Outage(log, "messages to the broker about free entries", clock=core.clock)

    def __len__(self) -> int:
        return len(self._freed) + len(self._reserved)

    @property
    def due(self) -> bool:
        """Whether something is owed, and the last attempt is long enough ago."""
        return len(self) > 0 and self._core.clock.monotonic_ns() >= self._due_ns

    def freed(self, key: bytes, *, withdrawn: bool) -> None:
        """Bytes of this entry are free."""
        self._freed[key] = withdrawn or self._freed.get(key, False)

    def reserved(self, call: Reserve) -> None:
        """This reservation may stand at the broker, and nothing will come of it."""
        self._reserved[call.key] = call

    def forgive(self, key: bytes) -> None:
        """A new entry of this key stands at the broker."""
        self._freed.pop(key, None)

    def clear(self) -> None:
        """The broker knows nothing of all that any more."""
        self._freed.clear()
        self._reserved.clear()

    async def pay(self, parent: Parent) -> bool:
        """Tell it. False when the broker could not be told."""
        if not len(self):
            return True
        self._due_ns = self._core.clock.monotonic_ns() + _RETRY_NS
        try:
            for call in tuple(self._reserved.values()):
                await self._take_back(call, parent)
            await self._tell_freed(parent)
        except (Unavailable, BrokerRefused) as error:
            self._outage.failed(error.code)
            return False
        self._outage.worked()
        return True

    async def _take_back(self, call: Reserve, parent: Parent) -> None:
        """Ask again, which gives the same reservation or a new one of no bytes, and abort it: rows that passed over
        when the lost call was granted go back to where this worker keeps them."""
        again = msgspec.structs.replace(call, state_bytes=0)
        try:
            reply = await self._core.broker.ask(again, ReserveReply, parent)
        except BrokerRefused as refused:
            if unknown(refused):
                raise
        else:
            if reply.reservation_id is not None:
                who = self._core.identity
                abort = Abort(reservation_id=reply.reservation_id, worker_id=who.worker_id)
                await self._core.broker.ask(abort, Done, parent)
        del self._reserved[call.key]

    async def _tell_freed(self, parent: Parent) -> None:
        due = dict(self._freed)
        who = self._core.identity
        unasked = tuple(key for key, withdrawn in due.items() if not withdrawn)
        if unasked:
            ask = Withdraw(worker_id=who.worker_id, epoch=who.epoch, keys=unasked)
            for key in (await self._core.broker.ask(ask, WithdrawReply, parent)).refused:
                del due[key]
        if due:
            call = Freed(worker_id=who.worker_id, epoch=who.epoch, keys=tuple(due))
            await self._core.broker.ask(call, Done, parent)
        for key in due:
            del self._freed[key]
