"""Sets running streams aside: those whose launch did not fit, the youngest when rows run out, and who has most when somebody
new comes. They stand at the head of the line again, and come back with what they said as their journal.

`preemption` and `seats` decide who; this acts. Knows streams, the line and the cache. Does not know what a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.gpu_worker.engine.accounts import Counters
from services.gpu_worker.engine.cache.entry import Capture
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.events import Event
from services.gpu_worker.engine.faults import Faults
from services.gpu_worker.engine.keeper import Keeper
from services.gpu_worker.engine.line import Line
from services.gpu_worker.engine.preemption import by_age, gives_way, spare_blocks
from services.gpu_worker.engine.scheduler import Room
from services.gpu_worker.engine.seats import gives_up_seat, seats_of
from services.gpu_worker.engine.streams import Stream
from shared.clock import Clock


class Aside:
    """`active` = the engine's running streams, seen live: who is set aside leaves them. `announce` tells captures;
    `land` ends what is on its way."""

    def __init__(
        self,
        active: list[Stream],
        cache: CacheManager,
        line: Line,
        keeper: Keeper,
        *,
        announce: Callable[[Sequence[Capture]], None],
        land: Callable[[], None],
        counters: Counters,
        faults: Faults | None,
        clock: Clock,
        tell: Callable[[Event], None],
    ) -> None:
        self._active = active
        self._cache = cache
        self._line = line
        self._keeper = keeper
        self._announce = announce
        self._land = land
        self._counters = counters
        self._faults = faults
        self._clock = clock
        self._tell = tell

    def begin_again(self) -> None:
        """Streams whose launch did not fit go back to the head of the queue, in their order, past its limit."""
        lost = [stream for stream in self._active if stream.aside and stream.session.ending is None]
        for stream in reversed(lost):
            self._put_back(stream)

    def make_way(self) -> None:
        """Running streams get their next rows before anybody is admitted, the oldest first. When there are none left,
        the youngest gives its blocks away, once eviction had the time to bring some."""
        for stream in [stream for stream in self._active if self._told_to_give_way(stream)]:
            self._preempt(stream)
        for stream in by_age(self._active):
            while stream.going and stream.session.primed and not self._fed(stream):
                evictable = self._cache.reclaimable() > 0
                victim = gives_way(self._active, stream, evictable=evictable)
                if (victim is not None or not evictable) and self._cache.decoded.free_blocks(1):
                    continue
                if victim is None:
                    break
                self._preempt(victim)
        if self._active and all(stream.starved for stream in self._active):
            self._line.free_holds(spare_blocks(self._active))

    def seat_newcomers(self, room: Room) -> None:
        """The first of a party that has nothing here gets a seat now, of a stream that gives way; pages are taken away only
        where eviction cannot bring them, one stream's a step."""
        seated, newcomers = self._line.take_turns(seats_of(self._active), room)
        free, leading = min(room.slots, room.batch) - len(seated), list(seated)
        for newcomer in newcomers:
            if free > 0 and self._cache.reclaimable():
                break
            victim = gives_up_seat(self._active, newcomer)
            if victim is None:
                continue
            self._preempt(victim)
            leading.append(newcomer)
            if free > 0:
                break
        if len(leading) > len(seated):
            self._line.lead(leading)

    def _told_to_give_way(self, stream: Stream) -> bool:
        if self._faults is None or not stream.going:
            return False
        return self._faults.give_way(stream.key, stream.session.committed_len)

    def _preempt(self, stream: Stream) -> None:
        """The stream keeps what is cached, gives the rest back and stands at the head of the queue."""
        self._land()
        stream.session.capture_here(self._cache)
        self._announce(stream.session.drain_captures())
        self._keeper.giving_way(stream)
        stream.give_way()
        self._counters.preempted += 1
        self._put_back(stream)

    def _fed(self, stream: Stream) -> bool:
        """Whether the stream has room for a row; counts the steps in which it had none."""
        room = self._cache.grow(stream.session.sequence, stream.session.rows_wanted)
        stream.starved = 0 if room else stream.starved + 1
        return room

    def _put_back(self, stream: Stream) -> None:
        """Set a stream aside: to the head of the queue, past its limit, unless it had its retries."""
        self._announce(stream.session.leftover_captures())
        waiting = stream.again(self._clock.monotonic_ns())
        if waiting is None:
            return
        self._active.remove(stream)
        self._keeper.waits(stream)
        self._line.come_back(waiting)
        self._counters.set_aside += 1
        self._tell(stream.parked(self._clock.wall_ns()))
