"""One attempt of one request: journal, claim, hit, engine, frames, terminal, acknowledgement.

    read the journal -> decide -> look up and lease -> Started (the claim) -> submit -> frames -> captures -> Terminal -> ack

At a first delivery the claim comes before the reading: it holds only if the journal is empty, which is all that reading
would tell. Whatever else it may be is read, and decided by that.

The ways out, each of which gives everything back (C6):
    done, failed, cancelled, refused   the terminal is journalled, then the work item is acknowledged
    fenced        another attempt wrote: publish nothing more, acknowledge nothing
    abandoned     the journal cannot be reached for longer than the patience: another attempt will find it
    handed_back   the worker drains: the work item is returned at once
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from services.gpu_worker import claim, journal, submit
from services.gpu_worker.claimant import Choices, Claimant
from services.gpu_worker.convert import prompt_tokens
from services.gpu_worker.core import Core
from services.gpu_worker.engine.events import Captured, Event
from services.gpu_worker.intake import Intake
from services.gpu_worker.item import WorkItem
from services.gpu_worker.journal import JournalState
from services.gpu_worker.lease import HitLease
from services.gpu_worker.publish import Owner, Publisher
from services.gpu_worker.relay import Relay
from services.gpu_worker.ways_out import WaysOut
from shared.errors import BurstlineError, EngineFault, FencedOut, Overloaded, ProtocolError, Unavailable
from shared.protocol import chain, subjects
from shared.protocol.messages import CancelRequest, Failure, GenerateRequest
from shared.transport.base import Delivery

log = logging.getLogger(__name__)


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
        adopted: bool = False,
        prompt_lost: bool = False,
    ) -> None:
        """`engine_id` is new for every attempt of the process; `busy` is set while many requests run (pacing). `adopted`: it
        was taken over from a fingerprint that has no worker left. `prompt_lost`: the chunks of its prompt are not there."""
        self.request = request
        self.engine_id = engine_id
        self._item = WorkItem(delivery)
        self._core = core
        self._publisher = publisher
        self._adopted = adopted
        self._prompt_lost = prompt_lost
        self._relay: Relay | None = None
        self._root = root = chain.root(request.namespace)
        self._span = core.telemetry.start(
            "worker.request",
            core.telemetry.extract(self._item.headers),
        )
        self._lease = HitLease(
            core,
            request_id=request.request_id,
            engine_id=engine_id,
            namespace=request.namespace,
            root=root,
            labels=request.cache.labels,
        )
        self._intake = Intake(
            core,
            request,
            engine_id,
            span=self._span,
            on_capture=self._offer,
            on_restored=self._lease.release,
        )
        self._claimant = Claimant(
            core,
            request,
            self._item,
            self._intake,
            self._lease,
            root=root,
            span=self._span,
            engine_id=engine_id,
            busy=busy,
        )
        self._out = WaysOut(core, publisher, self._item, self._intake, self._lease, self._span, engine_id)

    # ---- what others tell it ---------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """One event of the engine for this attempt."""
        self._intake.on_event(event)

    def cancel(self, message: CancelRequest) -> None:
        """A live cancellation."""
        self._intake.cancel(message)

    @property
    def subject(self) -> str:
        """Where its request was enqueued."""
        return self._item.subject

    def adopt(self, delivery: Delivery) -> None:
        """The queue delivered the request again while this attempt is at it."""
        self._item.adopt(delivery)

    async def keep(self) -> bool:
        """Extend the claim while there is progress, and look for a cancellation that was missed live. False when the
        request made no progress within the stall limit: it is left to whoever gets it next.

        Raises:
            Unavailable: the server does not answer; the next turn tries again.
        """
        if not self._intake.alive(self._core.settings.stall_limit_s):
            return False
        await self._item.extend()
        await self._look_for_cancels()
        return True

    # ---- its task --------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """From the delivery to its end. Returns the way out; raises only when it is cancelled (a hand-back)."""
        way_out, begun_ns = "handed_back", self._core.clock.wall_ns()
        try:
            way_out = await self._guarded()
        finally:
            self._core.telemetry.record("queue.wait", self._span, self.request.created_ns, begun_ns)
            self._intake.trace()
            self._span.set_attributes(
                {
                    "burstline.request": self.request.request_id,
                    "burstline.worker": self._core.identity.worker_id,
                    "burstline.end": way_out,
                }
            )
            if way_out == "handed_back" and self._relay is not None:
                await self._relay.hand_back()
            await self._out.close(way_out)
            self._core.metrics.requests.labels(way_out).inc()
            self._span.end()
        return way_out

    async def _guarded(self) -> str:
        try:
            try:
                return await self._run()
            except (FencedOut, Unavailable, Overloaded):
                raise
            except Exception as error:
                if self._relay is None or not self._core.host.loaded:
                    raise  # nothing can be written yet, or the engine is dead and the process goes down
                # A fault of ours in one request ends that request; redelivering it would only repeat it.
                log.exception("request %s ended by a fault", self.request.request_id)
                return await self._refuse(claim.internal(error), dead_letter=True)
        except FencedOut:
            return "fenced"
        except (Unavailable, Overloaded) as error:
            log.warning("request %s is left to another attempt (%s)", self.request.request_id, error.code)
        except Exception:
            # Raised again above: the journal was not read yet, or the process is about to go down. The work item comes
            # back, later each time, and goes with the stream's age limit at the latest.
            self._core.metrics.unbegun.inc()
            log.exception("request %s is left to another attempt", self.request.request_id)
        return "abandoned"

    async def _run(self) -> str:
        core, request = self._core, self.request
        if self._item.deliveries == 1 and (choices := await self._claim_unread()) is not None:
            return await self._serve(choices)
        try:
            state = await journal.read(core.transport, request.request_id, request.choices)
        except ProtocolError as error:
            self._relay = self._claimant.begin(
                await journal.last_only(core.transport, request.request_id, request.choices)
            )
            return await self._refuse(claim.failure_of(error), dead_letter=True)
        self._relay = self._claimant.begin(state)
        verdict = self._decide(state, await self._look_for_cancels())
        match verdict:
            case claim.AlreadyDone():
                await self._item.acknowledge()
                return "done"
            case claim.Refuse():
                return await self._refuse(verdict.failure, dead_letter=verdict.dead_letter)
            case claim.Cancelled():
                return await self._out.end(self._relay, None)
            case claim.Run():
                self._intake.outcome.forced = verdict.forced
                return await self._claimed(state)

    def _decide(self, state: JournalState, cancels: Sequence[CancelRequest]) -> claim.Verdict:
        core = self._core
        return claim.decide(
            self.request,
            state,
            cancels,
            fingerprint=core.identity.fingerprint,
            now_ns=core.clock.wall_ns(),
            max_attempts=core.settings.max_attempts,
            adopted=self._adopted,
        )

    async def _claim_unread(self) -> Choices | None:
        """Nobody had the request before, as far as the queue knows: claim it as the first, and the fence tells whether the
        journal is as empty as that takes for granted. None when it is not, or when the request is not to run: that is
        decided by what the journal holds. Cancellations are looked for meanwhile.

        Raises:
            Unavailable, Overloaded: the claim could not be written, or it is not known what was cancelled.
        """
        state = journal.empty(self.request.choices)
        if not isinstance(self._decide(state, ()), claim.Run):
            return None
        try:
            tokens = prompt_tokens(self.request)
        except BurstlineError:
            return None
        looking = await self._core.transport.look(
            subjects.CANCELS.name, subjects.cancel(self.request.request_id)
        )
        self._relay = self._claimant.begin(state)
        try:
            choices = await self._claimant.claim(self._relay, state, tokens)
            if await journal.may_be_cancelled(looking):
                await self._look_for_cancels()
        except FencedOut:
            self._relay = None
            return None
        finally:
            looking.drop()
        return choices

    async def _claimed(self, state: JournalState) -> str:
        """Claim it after what the journal holds, and see it to its end."""
        if self._relay is None:
            raise EngineFault("a request is claimed before its journal was read")
        if self._prompt_lost:
            if self._item.deliveries < self._core.settings.max_attempts:
                # Delivered again, later each time, so that it is looked for as often.
                raise Unavailable("the prompt is not there", code=claim.BODY_LOST)
            return await self._refuse(claim.body_lost(self._item.deliveries), dead_letter=True)
        try:
            tokens = prompt_tokens(self.request)
        except BurstlineError as error:
            return await self._refuse(claim.failure_of(error), dead_letter=False)
        return await self._serve(await self._claimant.claim(self._relay, state, tokens))

    async def _serve(self, choices: Choices) -> str:
        """A claimed request, to its end."""
        if self._relay is None:
            raise EngineFault("a request is served before it was claimed")
        failure = None
        if self._intake.outcome.open:
            refused = await submit.submit(self._core, self._intake, choices, self.request.grammar)
            failure = refused or await self._relay.run()
        return await self._out.end(self._relay, failure)

    async def _refuse(self, failure: Failure, *, dead_letter: bool) -> str:
        """End it with a failure of its own."""
        if self._relay is None:
            raise EngineFault("a request is refused before its journal was read")
        if dead_letter:
            await self._out.bury(failure.code)
        await self._out.end(self._relay, failure)
        return "refused"

    # ---- pieces ----------------------------------------------------------------------------------------------------

    async def _look_for_cancels(self) -> tuple[CancelRequest, ...]:
        """The journalled cancellations; noted at once. Raises Unavailable."""
        messages = await journal.cancellations(self._core.transport, self.request.request_id)
        for message in messages:
            self._intake.cancel(message)
        return messages

    def _offer(self, capture: Captured) -> None:
        owner = Owner(
            request_id=self.request.request_id,
            namespace=self.request.namespace,
            root=self._root,
            parent=self._span,
        )
        self._publisher.offer(capture, owner)
