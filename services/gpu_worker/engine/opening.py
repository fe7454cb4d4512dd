"""Opens streams: a request that was admitted gets its sequence, what it goes on from, its session and its drafter.

Knows the cache and the sessions. Does not know who is admitted, nor what runs.
"""

from __future__ import annotations

from collections.abc import Callable

from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.events import Admitted, DrafterOffReason, Event
from services.gpu_worker.engine.faults import Faults
from services.gpu_worker.engine.keeper import Keeper
from services.gpu_worker.engine.scheduler import Speculation
from services.gpu_worker.engine.sequence import SequenceState, layer_states, session_hash
from services.gpu_worker.engine.sessions.factory import SessionFactory
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.streams import Stream
from services.gpu_worker.engine.waiting import Waiting
from shared.clock import Clock
from shared.errors import EngineFault


class Opener:
    """`reserve` = completion rows that a stream goes in with."""

    def __init__(
        self,
        dims: ModelDims,
        cache: CacheManager,
        sessions: SessionFactory,
        keeper: Keeper,
        *,
        reserve: int,
        faults: Faults | None,
        clock: Clock,
        tell: Callable[[Event], None],
    ) -> None:
        self._dims = dims
        self._cache = cache
        self._sessions = sessions
        self._keeper = keeper
        self._reserve = reserve
        self._faults = faults
        self._clock = clock
        self._tell = tell

    def open(self, waiting: Waiting, verdict: Speculation) -> Stream:
        """The request, which was planned to fit, as a stream at the start of its prime. Raises EngineFault when it does
        not fit."""
        request, past, sequence = waiting.request, waiting.past, SequenceState.host_only()
        began = self._clock.monotonic_ns()
        sequence.session_hash = session_hash(request.root, *request.key)
        base = self._cache.base(request, waiting.checkpoint)
        admission = self._cache.admit(request, sequence, waiting.rows(self._reserve), base)
        if admission is None:
            raise EngineFault("a planned admission did not fit")
        sequence.layer_states = layer_states(self._dims.layer_types, sequence.slot_idx)
        speculate = verdict is Speculation.ADMIT
        session = self._sessions.open(
            request,
            sequence,
            speculate=speculate,
            last_hidden=admission.last_hidden,
            counters=past.counters if past else None,
            capture_disabled=past.capture_disabled if past else False,
        )
        session.overshoot = self._faults.overshoot(request.key) if self._faults else 0
        now = self._clock.wall_ns()
        stream = Stream(request=request, session=session, prime_ns=now, past=past, number=waiting.number)
        if base is not None and base is waiting.checkpoint:
            self._keeper.runs(stream, base)
            session.resume(self._cache)
        if not speculate and self._sessions.drafts(request):
            stream.drafter_off(DrafterOffReason.LOAD)
        elif past is None and self._sessions.drafts(request) and not isinstance(session, SpecSession):
            stream.drafter_off(DrafterOffReason.DRAFT_ROWS)
        if past is None:
            self._tell(
                Admitted(
                    request_id=request.request_id,
                    choice=request.choice,
                    cached_tokens=sequence.cached_prefix_tokens,
                    hit_key=admission.hit_key,
                    reuse=stream.reuse,
                    queue_ns=began - waiting.since_ns,
                    restore_ns=self._clock.monotonic_ns() - began,
                    end_ns=now,
                )
            )
        return stream
