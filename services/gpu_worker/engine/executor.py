"""Carries a plan out over running streams: prefill chunks, hand-offs to plain decode, rounds.

A launch that did not fit leaves the states of its slots undefined, so every stream in it is set aside, for the engine to
begin again (`Stream.aside`). Any other fault of a launch ends its streams, since none can be trusted after it.

Knows streams, sessions and the runner. Does not know the queue, nor who may run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from services.gpu_worker.engine.accounts import Counters
from services.gpu_worker.engine.batch import PrefillChunk
from services.gpu_worker.engine.cache.entry import Capture
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.events import DrafterOffReason, Event
from services.gpu_worker.engine.faults import OutOfMemory
from services.gpu_worker.engine.headroom import Headroom
from services.gpu_worker.engine.sessions.append import append_rows
from services.gpu_worker.engine.sessions.handoff import FlushForward, flush_pending, hand_off
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.sessions.rounds import Forward, run_round
from services.gpu_worker.engine.streams import Stream, captured
from shared.clock import Clock
from shared.errors import EngineFault


class Launches(Forward, FlushForward, Protocol):
    """What is asked of the runner."""

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Tensor]: ...


class Executor:
    """`between` is called where a stream may be ended from outside: after each chunk and each round. `tell` takes the
    events; `capture_bytes` = (of a state, of a block)."""

    def __init__(
        self,
        runner: Launches,
        cache: CacheManager,
        *,
        max_batch: int,
        counters: Counters,
        clock: Clock,
        tell: Callable[[Event], None],
        capture_bytes: tuple[int, int],
        between: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._headroom = Headroom(max_batch)
        self._counters = counters
        self._clock = clock
        self._tell = tell
        self._state_bytes, self._block_bytes = capture_bytes
        self._between = between

    def prime(self, stream: Stream, rows: int, *, most: int) -> None:
        """Prime `rows` of the prompt in chunks of at most `most` rows, cut where a capture is due; none are left when
        all of it was restored."""
        session = stream.session
        if not session.prime_left:
            with self._launch([stream]):
                session.end_prime(self._runner.logits(session.restored(self._cache)).numpy()[0])
        if session.append_width:
            rows = self._append(stream, rows)
        while rows > 0 and stream.going:
            chunk = session.next_chunk(min(rows, stream.chunk_rows(most)), self._cache)
            with self._launch([stream]):
                (hidden,) = self._runner.prefill([chunk])
                session.score(chunk, hidden, self._runner.logits)
                session.prefilled(chunk, hidden, self._cache)
                if session.primed:
                    session.end_prime(self._runner.logits(hidden[-1:]).numpy()[0])
            rows -= len(chunk.tokens)
            self._counters.prefill_tokens += len(chunk.tokens)
            self.announce(session.drain_captures())
            self._tell_scores(stream)
            self._between()
        if session.primed and not stream.aside:
            self._tell(stream.primed(self._clock.wall_ns()))

    def _append(self, stream: Stream, rows: int) -> int:
        """Run what lies between another turn's decode-made rows and the grid; answers how many of `rows` are left, whole
        tiles of them or all."""
        session, before = stream.session, stream.session.prime_left
        while stream.going and session.append_width:
            with self._launch([stream]):
                hidden = append_rows(session, self._runner)
                if session.primed:
                    session.end_prime(self._runner.logits(hidden[-1:]).numpy()[0])
            self._between()
        done = before - session.prime_left
        self._counters.prefill_tokens += done
        left = rows - done
        return left if left >= session.prime_left else left // BLOCK_ROWS * BLOCK_ROWS

    def _tell_scores(self, stream: Stream) -> None:
        """A stream that only primes has ended by now; one whose launch did not fit tells nothing of it."""
        scored = None if stream.aside else stream.prompt_scored(self._clock.wall_ns())
        if scored is not None:
            self._tell(scored)

    def decode(
        self,
        streams: Sequence[Stream],
        leaving: Sequence[Stream],
        rounds: int,
        *,
        stop: Callable[[], bool],
        onward: Callable[[], bool],
    ) -> None:
        """Hand `leaving` over to plain decode, run a burst over `streams`, tell what came. `onward` is asked before the
        last round: whether the next burst, as far as can be known, begins with the round after it."""
        start = self._clock.wall_ns()
        self._demote(leaving)
        self._burst(streams, rounds, stop, onward)
        end = self._clock.wall_ns()
        for stream in streams:
            burst = stream.burst(start, end)
            if burst is not None:
                self._counters.decode_tokens += len(burst.tokens)
                self._tell(burst)
            for news in stream.drafter_news(end):
                self._tell(news)
            self.announce(stream.session.drain_captures())

    def _demote(self, streams: Sequence[Stream]) -> None:
        """Hand the streams to plain decode; one whose rows are not what was delivered finishes in place (R-S16)."""
        ready = [stream for stream in streams if stream.demotable and self._has_room(stream)]
        for group in self._headroom.groups(ready):
            with self._launch(group):
                flush_pending(_speculative(group), self._runner)
            for stream in group:
                if stream.demotable and isinstance(stream.session, SpecSession):
                    plain = hand_off(stream.session, stream.fed)
                    if plain is None:
                        stream.in_place = True
                    else:
                        stream.session = plain
                        stream.drafter_off(DrafterOffReason.LOAD)

    def _burst(
        self, streams: Sequence[Stream], rounds: int, stop: Callable[[], bool], onward: Callable[[], bool]
    ) -> None:
        """Run up to `rounds` rounds over the streams that go on; ends early when `stop` says so. A round that is on its way
        then stays so for the next burst, unless a stream of it will give its slot away. Where `stop` is known before a round,
        none is launched after it: whoever comes would wait for it, and it would be for nobody."""
        for stream in streams:
            stream.session.begin_burst()
        try:
            for left in range(rounds, 0, -1):
                more = not stop() and (left > 1 or onward())
                if not self._round(streams, more=more) or stop():
                    return
                self._between()
        finally:
            self._runner.land([s.session.sequence.ssm_slot_idx() for s in streams if s.going])

    def _round(self, streams: Sequence[Stream], *, more: bool) -> bool:
        """One round; false when no stream could run it. `more` = another one is meant to follow."""
        ran = False
        ready = [stream for stream in streams if stream.going and self._has_room(stream)]
        groups = self._headroom.groups(ready)
        for group in groups:
            with self._launch(group):
                sessions = [stream.session for stream in group]
                ran = run_round(sessions, self._runner, more=more and len(groups) == 1) or ran
                self._headroom.fitted()
        return ran

    def _has_room(self, stream: Stream) -> bool:
        """Whether its next round has blocks; it gets free ones. Without, it sits out and the engine makes way."""
        return self._cache.grow(stream.session.sequence, stream.session.rows_wanted)

    def announce(self, captures: Sequence[Capture]) -> None:
        """Tell what waits for the broker."""
        for capture in captures:
            self._tell(
                captured(
                    capture,
                    state_bytes=self._state_bytes,
                    block_bytes=self._block_bytes,
                    now_ns=self._clock.wall_ns(),
                )
            )

    @contextmanager
    def _launch(self, streams: Sequence[Stream]) -> Iterator[None]:
        try:
            yield
        except OutOfMemory:
            self._headroom.exceeded(len(streams))
            for stream in streams:
                stream.set_aside(alone=len(streams) == 1)
        except EngineFault as fault:
            for stream in streams:
                stream.session.fail(fault.code, fault.message)


def _speculative(streams: Sequence[Stream]) -> list[SpecSession]:
    return [stream.session for stream in streams if isinstance(stream.session, SpecSession)]
