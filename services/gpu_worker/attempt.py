"""One attempt of one request: journal, claim, hit, engine, frames, terminal, acknowledgement.

    read the journal -> decide -> look up and lease -> Started (the claim) -> submit -> frames -> captures -> Terminal -> ack

The ways out, each of which gives everything back (C6):
    done, failed, cancelled, refused   the terminal is journalled, then the work item is acknowledged
    fenced        another attempt wrote: publish nothing more, acknowledge nothing
    abandoned     the journal cannot be reached for longer than the patience: another attempt will find it
    handed_back   the worker drains: the work item is returned at once
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from services.gpu_worker import claim, journal
from services.gpu_worker.convert import Tokens, engine_requests, prompt_tokens
from services.gpu_worker.core import Core
from services.gpu_worker.engine.requests import Captured, Event
from services.gpu_worker.frames import Chunk, FrameBuffer
from services.gpu_worker.intake import Intake
from services.gpu_worker.journal import Journal, JournalState
from services.gpu_worker.lease import HitLease
from services.gpu_worker.publish import Owner, Publisher
from shared.errors import BurstlineError, FencedOut, Overloaded, ProtocolError, Unavailable
from shared.protocol import chain, codec, subjects
from shared.protocol.messages import (
    CancelRequest,
    Failure,
    Frame,
    GenerateRequest,
    Started,
    Terminal,
    pack_tokens,
)
from shared.transport.base import Delivery

log = logging.getLogger(__name__)

_RETRY_DELAY_S = 0.5


class Attempt:
    """Belongs to the event loop; `run` is its task."""

    def __init__(
        self,
        core: Core,
        publisher: Publisher,
        request: GenerateRequest,
        delivery: Delivery,
        *,
        engine_id: str,
        busy: asyncio.Event,
    ) -> None:
        """`engine_id` is new for every attempt of the process; `busy` is set while many requests run (pacing)."""
        self.request = request
        self.engine_id = engine_id
        self._delivery = delivery
        self._core = core
        self._publisher = publisher
        self._busy = busy
        self._root = chain.root(request.namespace)
        self._span = core.telemetry.start(
            "worker.request",
            core.telemetry.extract(delivery.message.headers),
            {"burstline.request": request.request_id, "burstline.worker": core.identity.worker_id},
        )
        self._lease = HitLease(
            core,
            request_id=request.request_id,
            engine_id=engine_id,
            namespace=request.namespace,
            root=self._root,
        )
        self._intake = Intake(
            core,
            request,
            engine_id,
            span=self._span,
            on_capture=self._offer,
            on_restored=self._lease.release,
        )

    # ---- what others tell it ---------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """One event of the engine for this attempt."""
        self._intake.on_event(event)

    def cancel(self, message: CancelRequest) -> None:
        """A live cancellation."""
        self._intake.cancel(message)

    def adopt(self, delivery: Delivery) -> None:
        """The queue delivered the request again while this attempt is at it: that delivery is the one to end now."""
        self._delivery = delivery

    async def keep(self) -> bool:
        """Extend the claim while there is progress, and look for a cancellation that was missed live. False when the
        request made no progress within the stall limit: it is left to whoever gets it next.

        Raises:
            Unavailable: the server does not answer; the next turn tries again.
        """
        if not self._intake.alive(self._core.settings.stall_limit_s):
            return False
        await self._delivery.progress()
        await self._read_cancel()
        return True

    # ---- its task --------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """From the delivery to its end. Returns the way out; raises only when it is cancelled (a hand-back)."""
        way_out = "handed_back"
        try:
            way_out = await self._run()
        except FencedOut:
            way_out = "fenced"
        except (Unavailable, Overloaded) as error:
            log.warning("request %s is left to another attempt (%s)", self.request.request_id, error.code)
            way_out = "abandoned"
        finally:
            self._span.set_attribute("burstline.end", way_out)
            await self._close(way_out)
            self._core.metrics.requests.labels(way_out).inc()
            self._span.end()
        return way_out

    async def _run(self) -> str:
        core, request = self._core, self.request
        core.telemetry.record("queue.wait", self._span, request.created_ns, core.clock.wall_ns())
        try:
            state = await journal.read(core.transport, request.request_id, request.choices)
        except ProtocolError as error:
            return await self._refuse(await self._broken(), claim.failure_of(error), dead_letter=True)
        verdict = claim.decide(
            request,
            state,
            await self._read_cancel(),
            fingerprint=core.identity.fingerprint,
            now_ns=core.clock.wall_ns(),
            max_attempts=core.settings.max_attempts,
        )
        match verdict:
            case claim.AlreadyDone():
                await self._delivery.ack()
                return "done"
            case claim.Refuse():
                return await self._refuse(state, verdict.failure, dead_letter=verdict.dead_letter)
            case claim.Cancelled():
                return await self._end(self._writer(state), state.attempt + 1, state.offsets, None)
            case claim.Run():
                return await self._claimed(state, verdict.attempt)

    async def _claimed(self, state: JournalState, attempt: int) -> str:
        try:
            tokens = prompt_tokens(self.request)
        except BurstlineError as error:
            return await self._refuse(state, claim.failure_of(error), dead_letter=False)
        self._intake.buffer = FrameBuffer(state.offsets)
        keys = chain.chain(self._root, tokens)
        cached = await self._find_hit(tokens, keys)
        writer = self._writer(state)
        await writer.append(self._started(attempt, cached, state))
        failure = None
        if self._intake.outcome.open:
            failure = await self._submit(tokens, keys, state)
            failure = failure or await self._stream(writer, attempt)
        return await self._end(writer, attempt, self._intake.buffer.offsets, failure)

    async def _find_hit(self, tokens: Tokens, keys: tuple[bytes, ...]) -> int:
        """Tokens that an entry will serve; the decision goes into the terminal."""
        if not self.request.cache.enabled:
            return 0
        hit, decision = await self._lease.find(tokens, keys, self._span)
        self._intake.outcome.cache_decision = decision
        return hit.position if hit else 0

    async def _submit(self, tokens: Tokens, keys: tuple[bytes, ...], state: JournalState) -> Failure | None:
        choices = engine_requests(
            self.request,
            engine_id=self.engine_id,
            root=self._root,
            tokens=tokens,
            chain=keys,
            emitted=state.tokens,
            max_drafts=self._core.max_drafts,
        )
        self._intake.submitted = True
        try:
            await self._core.host.call(
                lambda engine: [engine.submit(choice) for choice in choices], urgent=True
            )
        except BurstlineError as error:
            # Of several choices some may run already: none of them is wanted without the others.
            self._core.host.cancel(self.engine_id, "refused")
            self._intake.submitted = False
            return claim.failure_of(error)
        if not self._intake.outcome.open:  # cancelled while it was submitted
            self._core.host.cancel(self.engine_id, "cancelled")
        return None

    async def _stream(self, writer: Journal, attempt: int) -> Failure | None:
        """Journal frames until the engine told the end of every choice. One publish in flight; the rest coalesces."""
        intake = self._intake
        while True:
            if intake.fault is not None:
                return claim.failure_of(intake.fault)
            chunk = intake.buffer.take()
            if chunk is not None:
                await writer.append(self._frame(attempt, chunk))
                self._core.metrics.frames.inc()
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

    async def _end(
        self, writer: Journal, attempt: int, emitted: tuple[int, ...], failure: Failure | None
    ) -> str:
        """The terminal, then the acknowledgement: only what the journal holds is acknowledged."""
        core = self._core
        await self._publisher.settled(self.engine_id, limit_s=core.settings.publish_wait_s)
        terminal = self._intake.outcome.terminal(
            attempt=attempt,
            worker_id=core.identity.worker_id,
            emitted=emitted,
            failure=failure,
            at_ns=core.clock.wall_ns(),
        )
        await writer.append(terminal)
        self._tell(terminal)
        await self._delivery.ack()
        if terminal.failure is not None:
            return "failed"
        return "done" if terminal.cancel_reason is None else "cancelled"

    async def _refuse(self, state: JournalState, failure: Failure, *, dead_letter: bool) -> str:
        if dead_letter:
            await self._core.transport.append(
                subjects.dead(self._core.identity.fingerprint),
                self._delivery.message.data,
                message_id=f"{self.request.request_id}-dead",
                headers=self._delivery.message.headers,
            )
        await self._end(self._writer(state), state.attempt + 1, state.offsets, failure)
        return "refused"

    async def _close(self, way_out: str) -> None:
        """Whatever the way out: nothing stays in the engine or at the broker."""
        if self._intake.submitted and not self._intake.outcome.complete:
            self._core.host.cancel(self.engine_id, way_out)
        try:
            await self._lease.close(submitted=self._intake.submitted)
            if way_out == "handed_back":
                await self._delivery.nak()
            elif way_out == "abandoned":
                await self._delivery.nak(delay_s=_RETRY_DELAY_S)
        except BurstlineError as error:
            log.info("request %s: what is left goes by expiry (%s)", self.request.request_id, error.code)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _offer(self, capture: Captured) -> None:
        owner = Owner(
            request_id=self.request.request_id,
            namespace=self.request.namespace,
            root=self._root,
            parent=self._span,
        )
        self._publisher.offer(capture, owner)

    async def _read_cancel(self) -> CancelRequest | None:
        """The journalled cancellation, if any; noted at once. Raises Unavailable."""
        subject = subjects.cancel(self.request.request_id)
        stored = await self._core.transport.last(subjects.CANCELS.name, subject)
        if stored is None:
            return None
        try:
            message = codec.decode_as(CancelRequest, stored.data)
        except ProtocolError:
            log.warning("an unreadable cancellation of %s is ignored", self.request.request_id)
            return None
        self._intake.cancel(message)
        return message

    async def _broken(self) -> JournalState:
        """A journal that cannot be read can still be closed: after its last message, whatever that is."""
        subject = subjects.tokens(self.request.request_id)
        last = await self._core.transport.last(subjects.JOURNAL.name, subject)
        return replace(journal.empty(self.request.choices), sequence=last.sequence if last else 0)

    def _writer(self, state: JournalState) -> Journal:
        return Journal(
            self._core.transport,
            self.request.request_id,
            state.sequence,
            clock=self._core.clock,
            patience_s=self._core.settings.journal_patience_s,
            headers=self._core.telemetry.headers(self._span),
        )

    def _started(self, attempt: int, cached: int, state: JournalState) -> Started:
        return Started(
            request_id=self.request.request_id,
            attempt=attempt,
            worker_id=self._core.identity.worker_id,
            fingerprint=self._core.identity.fingerprint,
            cached_tokens=cached,
            resumed_offsets=state.offsets,
            at_ns=self._core.clock.wall_ns(),
        )

    def _frame(self, attempt: int, chunk: Chunk) -> Frame:
        return Frame(
            request_id=self.request.request_id,
            attempt=attempt,
            choice=chunk.choice,
            offset=chunk.offset,
            tokens=pack_tokens(chunk.tokens),
            logprobs=chunk.logprobs,
        )

    def _tell(self, terminal: Terminal) -> None:
        metrics = self._core.metrics
        metrics.cache.labels(terminal.cache_decision).inc()
        metrics.prompt_tokens.inc(terminal.prompt_tokens)
        metrics.cached_tokens.inc(terminal.cached_tokens)
        metrics.queue_seconds.observe(terminal.queue_ns / 1e9)
        self._span.set_attributes(
            {
                "burstline.cache_decision": terminal.cache_decision,
                "burstline.prompt_tokens": terminal.prompt_tokens,
                "burstline.cached_tokens": terminal.cached_tokens,
                "burstline.completion_tokens": terminal.completion_tokens,
                "burstline.failure": terminal.failure.code if terminal.failure else "",
            }
        )
