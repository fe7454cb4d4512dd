"""The line of requests that wait: who comes, who goes in, which hits give way, which streams come back to its head.

Knows the cache's room and the hits of those who wait. Does not know sessions, nor what runs but for the room it leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from services.gpu_worker.engine.cache.decoded import DecodedState
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.events import Event, HitDropped, SpecTelemetry
from services.gpu_worker.engine.faults import StreamKey
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.scheduler import Room, admissions
from services.gpu_worker.engine.seats import in_turn, newcomers
from services.gpu_worker.engine.waiting import Waiting
from shared.errors import InvalidRequest, Overloaded


class Line:
    """First come, first served, but for turns between parties. `tell` takes the events that happen here."""

    def __init__(
        self, cache: CacheManager, *, most: int, reserve: int, tell: Callable[[Event], None]
    ) -> None:
        """`most` may wait; `reserve` = completion rows that one goes in with."""
        self._cache = cache
        self._most = most
        self._reserve = reserve
        self._joined = 0
        self._tell = tell
        self._waiting: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def blocks_wanted(self) -> int:
        """Fresh blocks that the head needs, 0 when nobody waits."""
        return self._fresh_blocks(self._waiting[0]) if self._waiting else 0

    @property
    def base(self) -> DecodedState | None:
        """What the head will go on from beside a hit."""
        return self._base(self._waiting[0]) if self._waiting else None

    def _base(self, waiting: Waiting) -> DecodedState | None:
        return self._cache.base(waiting.request, waiting.checkpoint)

    def _fresh_blocks(self, waiting: Waiting) -> int:
        base = self._base(waiting)
        return self._cache.fresh_blocks(waiting.request, waiting.rows(self._reserve), base)

    def telemetry(self) -> list[SpecTelemetry]:
        """What streams that came back had done before."""
        return [waiting.telemetry for waiting in self._waiting]

    def join(self, request: GenerateRequest, now_ns: int, running: Collection[StreamKey]) -> None:
        """Stand at the end. Raises InvalidRequest for a stream that is there already, Overloaded when the line is
        full."""
        if request.key in running or any(waiting.request.key == request.key for waiting in self._waiting):
            raise InvalidRequest("this choice of this request runs already", param="request_id")
        if len(self._waiting) >= self._most:
            raise Overloaded(f"{len(self._waiting)} requests wait already")
        self._joined += 1
        self._waiting.append(Waiting(request=request, since_ns=now_ns, number=self._joined))
        self._cache.expect(request.request_id)

    def come_back(self, waiting: Waiting) -> None:
        """A stream that was set aside stands at the head, past the limit (FR-107), with a hit if there is one."""
        request = waiting.request
        self._waiting.appendleft(waiting)
        if request.use_cache:
            self._cache.lookup(request.request_id, request.root, request.tokens, request.chain)
        self._cache.expect(request.request_id)

    def published(self) -> None:
        """There is a new entry: streams that came back take it if it is theirs, before eviction does (FR-19)."""
        for waiting in self._waiting:
            if waiting.past is not None:
                self._cache.deepen(waiting.request)

    def leave(self, who: Callable[[StreamKey], bool]) -> list[Waiting]:
        """Those `who` names leave; answers them."""
        leaving = [waiting for waiting in self._waiting if who(waiting.request.key)]
        for waiting in leaving:
            self._waiting.remove(waiting)
            self._cache.abandon(waiting.request.request_id)
            self._cache.decoded.drop(waiting.checkpoint)
        return leaving

    def admit(self, room: Room) -> Iterator[Waiting]:
        """Those who go in now, in order, their hits on the device. A hit whose bytes were wrong ends the round: it is a
        miss, and room is planned anew."""
        count = admissions([self._fresh_blocks(waiting) for waiting in self._waiting], room)
        for _ in range(count):
            if not self._is_here(self._waiting[0]):
                return
            yield self._waiting.popleft()

    def _is_here(self, waiting: Waiting) -> bool:
        """Bring what it goes on from to the device. False when that is gone, or when what went in before it took what
        it needs."""
        if self._fresh_blocks(waiting) > self._cache.blocks.free:
            return False
        base = self._base(waiting)
        if base is not None:
            return self._cache.bring_base(base)
        key = self._cache.bring_back(waiting.request.request_id)
        if key is not None:
            self._dropped(waiting, key)
        return key is None

    def take_turns(self, seats: Mapping[str, int], room: Room) -> tuple[list[Waiting], list[Waiting]]:
        """Bring to the head those whose turn it is by the seats that their parties have: who fits, and the newcomers who do
        not. One party alone keeps its order."""
        if len({waiting.request.party for waiting in self._waiting} | set(seats)) < 2:
            return [], []
        self.lead(in_turn(self._waiting, seats, max(1, min(room.slots, room.batch))))
        count = admissions([self._fresh_blocks(waiting) for waiting in self._waiting], room)
        seated = [self._waiting[place] for place in range(count)]
        return seated, newcomers(self._waiting, seats, seated)

    def lead(self, first: Sequence[Waiting]) -> None:
        """They stand at the head, in this order."""
        for waiting in reversed(first):
            self._waiting.remove(waiting)
            self._waiting.appendleft(waiting)

    def free_holds(self, wanted: int | None = None) -> None:
        """Nothing runs on and `wanted` blocks (null = what the head needs) are not free: hits that wait must not keep
        entries from eviction.

        The youngest give way first, the head last; they run cold.
        """
        for waiting in reversed(self._waiting):
            short = (self.blocks_wanted if wanted is None else wanted) - self._cache.blocks.free
            if short <= self._cache.reclaimable():
                return
            key = self._cache.drop_hit(waiting.request.request_id)
            if key is not None:
                self._dropped(waiting, key)

    def _dropped(self, waiting: Waiting, key: bytes) -> None:
        """Say that a hit is gone, unless its lease went with an earlier life."""
        if waiting.past is None:
            self._tell(HitDropped(request_id=waiting.request.request_id, key=key))
