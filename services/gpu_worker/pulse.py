"""Heartbeats, and the watchdog on forward progress. Both go on while the engine thread computes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from services.gpu_worker.core import Core
from shared.errors import BurstlineError, EngineFault
from shared.outage import Outage
from shared.protocol import codec, subjects
from shared.protocol.messages import Heartbeat, Speculation

log = logging.getLogger(__name__)

_SILENT_BEATS: Final = 3


class Pulse:
    """What others see of this worker. Belongs to the event loop."""

    def __init__(self, core: Core, *, running: Callable[[], int], after_silence: Callable[[], None]) -> None:
        """`after_silence` is called when a beat gets through after so long a silence that the broker may have noticed."""
        self._core = core
        self._running = running
        self._after_silence = after_silence
        self._heard_ns = core.clock.monotonic_ns()
        self._outage = Outage(log, "heartbeats", clock=core.clock)
        self.draining = False
        self.queued = 0
        """Requests on the worker's own subject that it has not taken."""

    @property
    def stalled(self) -> bool:
        """Work, and no progress for longer than the stall limit."""
        return self._core.host.quiet_s() >= self._core.settings.stall_limit_s

    @property
    def journal_fault(self) -> str | None:
        """Why nothing that is computed here could be answered, or None."""
        return self._core.storing.fault

    async def run(self) -> None:
        """Beat every `heartbeat_s`.

        Raises:
            EngineFault: the engine stalled. It was told as unready; the process has to end, so that others take over.
        """
        while True:
            stalled = self.stalled  # asked before the beat, so that the beat has told of it
            await self.beat()
            if stalled and self.stalled:
                raise EngineFault(f"no progress for {self._core.host.quiet_s():.0f} s", code="stalled")
            await asyncio.sleep(self._core.settings.heartbeat_s)

    async def beat(self) -> None:
        """One heartbeat; without a server there is nobody to miss it."""
        subject = subjects.heartbeat(self._core.identity.worker_id)
        try:
            await self._core.transport.publish(subject, codec.encode(self.heartbeat()))
        except BurstlineError as error:
            self._outage.failed(error.code)
            return
        # A connection that is away takes the beat all the same; only a round trip tells.
        if await self._core.transport.ready():
            self._outage.worked()
            now = self._core.clock.monotonic_ns()
            silence_s, self._heard_ns = (now - self._heard_ns) / 1e9, now
            if silence_s > _SILENT_BEATS * self._core.settings.heartbeat_s:
                self._after_silence()

    def heartbeat(self) -> Heartbeat:
        """The worker as gateways and the broker see it."""
        core, stats = self._core, self._core.host.stats
        dims = core.host.engine.dims
        drafter = core.settings.drafter
        if (drafter == "mtp" and not dims.has_mtp) or (
            drafter == "block" and core.settings.block_folder is None
        ):
            drafter = "none"
        # A block is drafted whole, and `auto` finds its own width.
        wanted = core.max_drafts if drafter in ("auto", "block") else core.settings.speculation_k
        drafts = min(wanted, core.max_drafts) if drafter != "none" else 0
        return Heartbeat(
            worker_id=core.identity.worker_id,
            epoch=core.identity.epoch,
            model=core.identity.model,
            fingerprint=core.identity.fingerprint,
            vocabulary_size=dims.vocab,
            max_context=min(core.settings.max_context, dims.max_positions),
            speculation=Speculation(drafter=drafter if drafts else "none", k=drafts),
            ready=core.host.loaded and not self.draining and not self.stalled and not self.journal_fault,
            draining=self.draining,
            running=self._running(),
            waiting=self.queued + (stats.waiting if stats else 0),
            free_blocks=stats.blocks.total - stats.blocks.owned if stats else 0,
            total_blocks=stats.blocks.total if stats else 0,
            at_ns=core.clock.wall_ns(),
        )
