"""Making an attempt's claim: what it hangs on in the journal, what it says of the cache, and what the engine does once it
is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from opentelemetry.trace import Span

from services.gpu_worker import claim
from services.gpu_worker.convert import Tokens, engine_requests
from services.gpu_worker.core import Core
from services.gpu_worker.engine.requests import GenerateRequest as EngineRequest
from services.gpu_worker.frames import FrameBuffer
from services.gpu_worker.intake import Intake
from services.gpu_worker.item import WorkItem
from services.gpu_worker.journal import Journal, JournalState
from services.gpu_worker.lease import HitLease
from services.gpu_worker.meanwhile import Meanwhile
from services.gpu_worker.relay import Relay
from shared.protocol import chain
from shared.protocol.messages import GenerateRequest

Choices: TypeAlias = Sequence[EngineRequest]


class Claimant:
    """Of one attempt; belongs to its task."""

    def __init__(
        self,
        core: Core,
        request: GenerateRequest,
        item: WorkItem,
        intake: Intake,
        lease: HitLease,
        *,
        root: bytes,
        span: Span,
        engine_id: str,
        busy: asyncio.Event,
    ) -> None:
        """`busy` is set while many requests run (pacing)."""
        self._core = core
        self._request = request
        self._item = item
        self._intake = intake
        self._lease = lease
        self._root = root
        self._span = span
        self._engine_id = engine_id
        self._busy = busy
        self._cached: int | None = None  # tokens that a hit will serve, once it was looked for

    def begin(self, state: JournalState) -> Relay:
        """What goes on after the journal as it stands."""
        self._intake.buffer = FrameBuffer(state.offsets, scored=state.scores, to_score=self._request.to_score)
        writer = Journal(
            self._core.transport,
            self._request.request_id,
            state.sequence,
            # Unique in the world: a message id that two attempts shared would pass the fence as a duplicate.
            message_ids=f"{self._engine_id}.{self._core.identity.epoch}.{state.sequence}",
            clock=self._core.clock,
            patience_s=self._core.settings.journal_patience_s,
            headers=self._core.telemetry.headers(self._span),
        )
        return Relay(
            self._core,
            self._intake,
            writer,
            request_id=self._request.request_id,
            attempt=state.attempt + 1,
            offsets=state.offsets,
            scored=state.scores,
            busy=self._busy,
        )

    async def claim(self, relay: Relay, state: JournalState, tokens: Tokens) -> Choices:
        """Journal the claim. What the engine is to do then. Raises what `Journal.append` raises."""
        keys = chain.chain(self._root, tokens)
        cached = await self._find_hit(tokens, keys)
        started = claim.started(
            self._request.request_id,
            relay.attempt,
            state,
            worker_id=self._core.identity.worker_id,
            fingerprint=self._core.identity.fingerprint,
            cached_tokens=cached,
            at_ns=self._core.clock.wall_ns(),
        )
        choices = Meanwhile(lambda: self._choices(state, tokens, keys))
        await relay.claim(started, delivery=self._item.deliveries)
        return choices.result()

    def _choices(self, state: JournalState, tokens: Tokens, keys: tuple[bytes, ...]) -> Choices:
        return engine_requests(
            self._request,
            engine_id=self._engine_id,
            root=self._root,
            tokens=tokens,
            chain=keys,
            emitted=state.tokens,
            scored=state.scores,
            max_drafts=self._core.max_drafts,
            journal_stands=self._intake.outcome.forced,
        )

    async def _find_hit(self, tokens: Tokens, keys: tuple[bytes, ...]) -> int:
        """Tokens that an entry will serve; the decision goes into the terminal. Asked once."""
        if not self._request.cache.enabled:
            return 0
        if self._cached is None and not keys and not self._request.cache.labels:
            self._cached, self._intake.outcome.cache_decision = 0, "miss"  # no entry is shorter than a block
        if self._cached is None:
            hit, self._intake.outcome.cache_decision = await self._lease.find(tokens, keys, self._span)
            self._cached = hit.position if hit else 0
        return self._cached
