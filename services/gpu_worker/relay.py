"""From the engine to the journal: one attempt's tokens as frames, one publish in flight, the rest coalesces meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from services.gpu_worker import claim
from services.gpu_worker.convert import frame_of
from services.gpu_worker.core import Core
from services.gpu_worker.frames import Scores
from services.gpu_worker.intake import Intake
from services.gpu_worker.journal import Journal
from shared.errors import BurstlineError, Overloaded, Unavailable
from shared.protocol import subjects
from shared.protocol.messages import Failure, Frame, Started, StreamMessage

log = logging.getLogger(__name__)

_HAND_BACK_S: Final = 1.0


class Relay:
    """Belongs to the attempt's task."""

    def __init__(
        self,
        core: Core,
        intake: Intake,
        writer: Journal,
        *,
        request_id: str,
        attempt: int,
        offsets: Sequence[int],
        scored: int,
        busy: asyncio.Event,
    ) -> None:
        """`offsets`: completion tokens of each choice that the journal holds, `scored` what it has of the prompt; `busy`
        is set while many requests run."""
        self._core = core
        self._intake = intake
        self._writer = writer
        self._request_id = request_id
        self.attempt = attempt
        self._busy = busy
        self._claimed = False
        self.emitted = list(offsets)
        """Completion tokens of each choice in the journal."""
        self.scored = scored
        """Prompt tokens whose log probabilities are in the journal."""

    async def claim(self, started: Started, *, delivery: int) -> None:
        """Journal the claim, which answers the `delivery`-th delivery. Raises what `Journal.append` raises."""
        await self._append(started, {subjects.DELIVERY: str(delivery)})
        self._claimed = True

    async def hand_back(self) -> None:
        """Tell that the request did nothing wrong, if it was claimed. As well as can be: it only counts where several workers
        in a row come to nothing with a request."""
        if not self._claimed:
            return
        told = Frame(
            request_id=self._request_id,
            attempt=self.attempt,
            choice=0,
            offset=self.emitted[0],
            tokens=b"",
            logprobs=None,
        )
        try:
            async with asyncio.timeout(_HAND_BACK_S):
                await self._writer.append(told)
        except (BurstlineError, TimeoutError) as error:
            log.info("request %s is handed back without a word (%s)", self._request_id, type(error).__name__)

    async def append(self, message: StreamMessage) -> None:
        """Journal a message. Raises what `Journal.append` raises."""
        await self._append(message, {})

    async def _append(self, message: StreamMessage, headers: Mapping[str, str]) -> None:
        try:
            await self._writer.append(message, headers=headers)
        except (Unavailable, Overloaded) as error:
            if await self._core.transport.ready():
                self._core.storing.gave_up(error.code)
            raise
        self._core.storing.stored()

    async def run(self) -> Failure | None:
        """Until the engine told the end of every choice. A failure is a fault in what it told.

        Raises:
            FencedOut, Unavailable, Overloaded: the journal, see `Journal.append`.
        """
        intake = self._intake
        while True:
            if intake.fault is not None:
                return claim.failure_of(intake.fault)
            chunk = intake.buffer.take()
            if chunk is not None:
                await self.append(frame_of(self._request_id, self.attempt, chunk))
                self._core.metrics.frames.inc()
                if isinstance(chunk, Scores):
                    self.scored = chunk.offset + len(chunk.entries)
                else:
                    self.emitted[chunk.choice] = chunk.offset + len(chunk.tokens)
                    await self._pace()
            elif intake.outcome.complete:
                return None
            else:
                await intake.wait()

    async def _pace(self) -> None:
        """While many requests run, a stream gets a frame at most every `frame_interval_s`."""
        if not self._busy.is_set() or self._intake.over.is_set():
            return
        try:
            async with asyncio.timeout(self._core.settings.frame_interval_s):
                await self._intake.over.wait()
        except TimeoutError:
            return
