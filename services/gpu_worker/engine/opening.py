"""Opens streams: a request that was admitted gets its sequence, what it goes on from, its session and its drafter.

Knows the cache and the sessions. Does not know who is admitted, nor what runs.
"""

from __future__ import annotations

from collections.abc import Callable

from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.choice import Choice, Chosen
from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.events import Admitted, ChoiceReason, DrafterOffReason, Event
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
    """`reserve` = completion rows that a stream goes in with; `running` = streams that there are."""

    def __init__(
        self,
        dims: ModelDims,
        cache: CacheManager,
        sessions: SessionFactory,
        keeper: Keeper,
        *,
        reserve: int,
        choice: Choice,
        running: Callable[[], int],
        faults: Faults | None,
        clock: Clock,
        tell: Callable[[Event], None],
    ) -> None:
        self._dims = dims
        self._cache = cache
        self._sessions = sessions
        self._keeper = keeper
        self._reserve = reserve
        self._choice = choice
        self._running = running
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
        chosen = self._chosen(waiting, sequence, verdict)
        session = self._sessions.open(
            request,
            sequence,
            drafter=chosen.drafter,
            last_hidden=admission.last_hidden,
            counters=past.counters if past else None,
            capture_disabled=past.capture_disabled if past else False,
            expected=chosen.expected if request.drafter == "auto" else None,
        )
        session.overshoot = self._faults.overshoot(request.key) if self._faults else 0
        now = self._clock.wall_ns()
        stream = Stream(request=request, session=session, prime_ns=now, past=past, number=waiting.number)
        stream.drafter = chosen.drafter
        if base is not None and base is waiting.checkpoint:
            self._keeper.runs(stream, base)
            session.resume(self._cache)
        if self._sessions.drafts(request):
            self._say(stream, chosen, verdict)
        elif past is None and self._sessions.lacks(request):
            stream.drafter = request.drafter
            stream.drafter_off(DrafterOffReason.ABSENT)
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

    def _chosen(self, waiting: Waiting, sequence: SequenceState, verdict: Speculation) -> Chosen:
        """The stream's drafter: the one that it had, that it asked for, or that is found best; none where it cannot
        serve, or nobody drafts now."""
        request, past = waiting.request, waiting.past
        if verdict is not Speculation.ADMIT or not self._sessions.drafts(request):
            return Chosen("none", ChoiceReason.NO_GAIN)
        fitting = self._sessions.fitting(request, sequence)
        if request.drafter != "auto":
            return Chosen(request.drafter if request.drafter in fitting else "none", ChoiceReason.GAIN)
        chosen = self._choice.choose(self._running() + 1, fitting)
        before = past.drafter if past is not None else None
        return chosen._replace(drafter=before) if before in fitting and before is not None else chosen

    def _say(self, stream: Stream, chosen: Chosen, verdict: Speculation) -> None:
        """Which drafter a stream got that left it open, or why it got none."""
        first, drafting = stream.past is None, isinstance(stream.session, SpecSession)
        if verdict is not Speculation.ADMIT:
            stream.drafter_off(DrafterOffReason.LOAD)
        elif stream.request.drafter == "auto" and first:
            self._tell(stream.chosen(chosen.reason, chosen.gains, self._clock.wall_ns()))
        elif first and not drafting:
            stream.drafter_off(self._sessions.misfit(stream.request))
        if not drafting and stream.drafter == "none":
            stream.drafter = stream.request.drafter
