"""The engine: `step()` plans, runs and answers events. One thread owns it.

    submit ──> waiting ──admit──> priming ──last chunk──> decoding ──ending──> Finished
                  ^                  │                       │ └── spec gate: high load ──> plain decode
                  └ out of memory, way given ┴────────────────┘
                                     └── boundaries ──> Captured ──> publish | discard

It knows tokens, pools and kernels. It does not know queues, HTTP, SQL, text or tenants: a namespace is a chain root.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.gpu_worker.engine.accounts import Counters, picture
from services.gpu_worker.engine.affinity import AffinityPool
from services.gpu_worker.engine.aside import Aside
from services.gpu_worker.engine.cancels import Cancel, Cancels
from services.gpu_worker.engine.choice import Choice
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.events import Event, FinishReason
from services.gpu_worker.engine.executor import Executor
from services.gpu_worker.engine.faults import Faults, StreamKey
from services.gpu_worker.engine.faulty import FaultyRunner
from services.gpu_worker.engine.ground import lay_out
from services.gpu_worker.engine.intake import check_request
from services.gpu_worker.engine.keeper import Keeper
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.line import Line
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.onward import flies_on
from services.gpu_worker.engine.opening import Opener
from services.gpu_worker.engine.preemption import spare_blocks
from services.gpu_worker.engine.requests import GenerateRequest, Hit
from services.gpu_worker.engine.scheduler import Room, Speculation, plan_step, speculation
from services.gpu_worker.engine.sessions.factory import SessionFactory
from services.gpu_worker.engine.sessions.outcome import Ending
from services.gpu_worker.engine.stats import EngineStats, Evicted, Pressure
from services.gpu_worker.engine.streams import Stream
from services.gpu_worker.engine.trials import gain_for
from services.gpu_worker.engine.wants import Wants
from shared.clock import SYSTEM, Clock


class Engine:
    """All methods but `cancel` and `interrupt` belong to the owning thread."""

    def __init__(
        self,
        config: EngineConfig,
        model: Path | LoadedModel,
        *,
        limits: EngineLimits | None = None,
        clock: Clock = SYSTEM,
        faults: Faults | None = None,
    ) -> None:
        """`faults` = what shall go wrong; tests and `prove` alone give it."""
        self._limits = limits or EngineLimits()
        ground = lay_out(model, config, self._limits)
        self.dims, self.fingerprint, self.memory = ground.dims, ground.fingerprint, ground.memory
        self._config = config = ground.config
        self.kv, self.states, self.ring, self.runner = ground.kv, ground.states, ground.ring, ground.runner
        self._slot_memory, self._cache = ground.slots, ground.cache
        self._gain = gain_for(self._limits.spec_gate, self.runner, config, self._slot_memory.reset, clock)
        self._clock = clock
        self._affinity = AffinityPool(self._cache, most=self._limits.max_parked)
        launches = FaultyRunner(self.runner, faults, self._slots) if faults else self.runner
        self._keeper = Keeper(self._cache, launches, interval=self._limits.decode_ckpt_blocks)
        self._sessions = SessionFactory(
            self.dims, config, self._limits, self.runner.block, steady=self.runner.runs_whole
        )
        self._faults = faults
        self._counters = Counters()
        self._executor = Executor(
            launches,
            self._cache,
            max_batch=config.max_batch,
            counters=self._counters,
            clock=clock,
            tell=self._tell,
            capture_bytes=(self.state_bytes, self.kv.block_bytes),
            between=self._apply_cancels,
        )
        self._line = Line(
            self._cache,
            most=self._limits.max_waiting,
            reserve=self._limits.decode_reserve,
            tell=self._tell,
        )
        self._opener = Opener(
            self.dims,
            self._cache,
            self._sessions,
            self._keeper,
            reserve=self._limits.decode_reserve,
            choice=Choice(self._gain, self._sessions.kinds, self._limits),
            running=lambda: len(self._active),
            faults=faults,
            clock=clock,
            tell=self._tell,
        )
        self._active: list[Stream] = []
        self._aside = Aside(
            self._active,
            self._cache,
            self._line,
            self._keeper,
            announce=self._executor.announce,
            land=launches.land,
            counters=self._counters,
            faults=faults,
            clock=clock,
            tell=self._tell,
        )
        self._wants = Wants(self._cache, self._line, self._active)
        self._events: list[Event] = []
        self._cancels = Cancels()
        self._interrupted = False

    # -- prefix cache -------------------------------------------------------------------------------------------

    def lookup(
        self,
        request_id: str,
        root: bytes,
        tokens: Sequence[int],
        chain: Sequence[bytes],
        labels: Sequence[str] = (),
    ) -> Hit | None:
        """The deepest entry that prefixes `tokens`, or is all of them. `labels` (session id, user) say which parked
        session it is expected to go on from; they change what is counted, never what is answered.

        Takes references once a request id: a second call answers the same. They go when every submitted choice of the
        request has restored them (or was cancelled), or by `drop_hit`. A request without a hit runs cold.
        """
        if not self._cache.holds(request_id):
            self._affinity.ask(root, tokens, chain, labels)
        return self._cache.lookup(request_id, root, tokens, chain)

    def drop_hit(self, request_id: str) -> None:
        """Give the hit back (the lease was refused, or the request is not submitted). Harmless without one."""
        self._cache.drop_hit(request_id)

    def publish(self, capture_id: int) -> bool:
        """The broker granted: the capture becomes an entry. False: it cannot any more (what it builds on is gone),
        everything it held is released, and the caller takes the grant back. Answer captures in their order."""
        published = self._cache.publish(capture_id)
        self._line.published()
        self._wants.make_room()
        return published

    def discard(self, capture_id: int) -> None:
        """The broker refused: release what the capture and later ones upon it hold. Unknown ids are ignored."""
        self._cache.discard(capture_id)

    def pressure(self) -> Pressure:
        """What should be evicted so that waiting work and captures fit; falsy when nothing."""
        return self._wants.pressure()

    def eviction_candidates(self, blocks_wanted: int, snapshots_wanted: int) -> list[bytes]:
        """Keys to withdraw at the broker, worst first; takes nothing away. May free less than wanted."""
        return self._cache.candidates(blocks_wanted, snapshots_wanted)

    def evict(self, keys: Sequence[bytes]) -> Evicted:
        """Free entries that the broker let go. One that is in use by now is left and not answered: name it again."""
        evicted = self._cache.evict(keys)
        self._wants.make_room()
        return evicted

    def spill(self, keys: Sequence[bytes]) -> int:
        """Move entries that nobody uses to the host tier now, as far as it has room; answers how many moved."""
        return self._cache.spill(keys)

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Most tokens of one sequence, prompt and completion together."""
        return min(self._sessions.shape.cache_max_ctx, self._config.num_blocks * self._config.block_rows)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request.

        Errors: ContextLengthExceeded names the largest servable length; InvalidRequest for ids out of the vocabulary,
        a chain that does not fit the tokens or a (request, choice) in use; Overloaded when the queue is full.
        """
        check_request(request, vocab=self.dims.vocab, window=self.window)
        running = {stream.key for stream in self._active}
        self._line.join(request, self._clock.monotonic_ns(), running)

    def cancel(self, request_id: str, reason: str, choice: int | None = None) -> None:
        """End a choice of a request (null = every one) at the next chunk or round; the others go on, unchanged. Thread-safe;
        unknown ids are ignored."""
        self._cancels.ask(Cancel(request_id=request_id, choice=choice, reason=reason))

    def interrupt(self) -> None:
        """End the current burst at its next round boundary, because new work waits outside. Thread-safe."""
        self._interrupted = True

    def has_work(self) -> bool:
        """Whether `step` could make progress or has something to end."""
        return bool(self._line or self._active or self._events or self._cancels)

    # -- step ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Admit, prime at most one chunk budget, run one burst. Returns at once with [] when nothing can run."""
        self._interrupted = False
        self._apply_cancels()
        self._wants.make_room()
        self._aside.make_way()
        self._aside.seat_newcomers(self._room())
        load = len(self._active) + len(self._line)
        verdict = speculation(load, self._limits.spec_gate, self._gain.at(load))
        self._admit(verdict)
        priming = [stream for stream in self._active if not stream.session.primed]
        plan = plan_step(
            [stream.session.prime_left for stream in priming],
            len(self._active) - len(priming),
            prefill_chunk=self._config.prefill_chunk,
            limits=self._limits,
        )
        for stream, rows in zip(priming, plan.prefill, strict=True):
            self._executor.prime(stream, rows, most=self._config.prefill_chunk)
        self._decode(plan.rounds, verdict)
        self._gain.learn(self._events)
        self._aside.begin_again()
        self._retire()
        self._wants.make_room()
        events, self._events = self._events, []
        return events

    def _admit(self, verdict: Speculation) -> None:
        for waiting in self._line.admit(self._room()):
            stream = self._opener.open(waiting, verdict)
            self._active.append(stream)
            if waiting.past is None and waiting.request.reuse == "decode":
                self._affinity.turn(waiting.request, served=stream.reuse == "decode")
        if self._line and not self._active:
            self._line.free_holds()

    def _room(self) -> Room:
        return Room(
            blocks=max(0, self._cache.blocks.free - spare_blocks(self._active)),
            slots=self._cache.slots.free,
            batch=self._config.max_batch - len(self._active),
        )

    def _decode(self, rounds: int, verdict: Speculation) -> None:
        """Hand over what shall decode plainly, then run the burst."""
        streams = [stream for stream in self._active if stream.session.primed]
        leaving = [stream for stream in streams if self._shall_demote(stream, verdict)]
        self._executor.decode(streams, leaving, rounds, stop=lambda: self._interrupted, onward=self._flies_on)
        self._keeper.after_burst(streams)

    def _flies_on(self) -> bool:
        """Whether the card goes on with the next burst while the host ends this one."""
        chunk = self._config.prefill_chunk
        alike = flies_on(self._active, waiting=len(self._line), room=self._room(), chunk=chunk)
        return alike and not self._keeper.due_soon(self._active)

    def _shall_demote(self, stream: Stream, verdict: Speculation) -> bool:
        if verdict is Speculation.DEMOTE:
            return True
        return self._faults is not None and self._faults.demote(stream.key, stream.session.telemetry().rounds)

    def _tell(self, event: Event) -> None:
        self._events.append(event)

    def _apply_cancels(self) -> None:
        """End streams that were cancelled; queued ones leave the queue."""
        for cancel in self._cancels.take():
            ending = Ending(reason=FinishReason.CANCELLED, detail=cancel.reason)
            for stream in self._active:
                if cancel.covers(stream.key):
                    stream.session.end(ending)
            for waiting in self._line.leave(cancel.covers):
                self._counters.add(waiting.telemetry)
                self._tell(waiting.refused(ending, self._clock.wall_ns()))

    def _retire(self) -> None:
        """Give back what ended streams hold, then say that they ended."""
        self._keeper.turn_ends(self._active)
        ended = [stream for stream in self._active if stream.session.ending is not None]
        self._active[:] = [stream for stream in self._active if stream.session.ending is None]
        for stream in ended:
            self._executor.announce(stream.session.leftover_captures())
            stream.session.park()
            self._keeper.ended(stream)
            self._sessions.finished(stream.request, stream.emitted)
            self._affinity.park(stream.session)
            finished = stream.finished(self._clock.wall_ns())
            self._counters.add(finished.telemetry)
            self._tell(finished)

    # -- accounts -----------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes of an entry's state: the snapshot, its window tail too, and the hidden of the row before it."""
        return self._slot_memory.snapshot_bytes + self.dims.hidden * 4

    def stats(self) -> EngineStats:
        """Pools, queues and counters."""
        return picture(self._cache, self._line, self._active, self._counters, self._affinity)

    def _slots(self) -> dict[int, StreamKey]:
        return {stream.session.sequence.ssm_slot_idx(): stream.key for stream in self._active}

    def check(self) -> None:
        """Recount every block, slot and snapshot from its holders. Raises EngineFault on a difference (C6)."""
        self._affinity.check()
        self._cache.check(stream.session.sequence for stream in self._active)
