"""Whose turn it is for a seat when several parties share the engine, and who gives one up. Pure: answers, changes nothing.

A seat goes to the party that has fewest, and among those to who stands first. A *newcomer*, the first of a party that has
nothing here, does not wait for a stream to end: the youngest stream of the party that has most gives way to it at the next
burst boundary. Where nobody has more than one, a stream gives way that has said something, and only once in its life, so that
it ends. Nobody else ever takes a seat away, so there are no more exchanges than requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from services.gpu_worker.engine.preemption import by_age
from services.gpu_worker.engine.streams import Stream
from services.gpu_worker.engine.waiting import Waiting


def seats_of(streams: Sequence[Stream]) -> Counter[str]:
    """Seats of each party."""
    return Counter(stream.request.party for stream in streams)


def in_turn(waiting: Sequence[Waiting], seats: Mapping[str, int], count: int) -> list[Waiting]:
    """The next `count` of the line, each of the party that then has fewest seats, the first in line among equals."""
    lines: dict[str, deque[tuple[int, Waiting]]] = {}
    for place, one in enumerate(waiting):
        lines.setdefault(one.request.party, deque()).append((place, one))
    has: Counter[str] = Counter(seats)
    chosen: list[Waiting] = []
    while lines and len(chosen) < count:
        party = min(lines, key=lambda name: (has[name], lines[name][0][0]))
        chosen.append(lines[party].popleft()[1])
        has[party] += 1
        if not lines[party]:
            del lines[party]
    return chosen


def newcomers(
    waiting: Sequence[Waiting], seats: Mapping[str, int], seated: Sequence[Waiting]
) -> list[Waiting]:
    """The first of every party that has no seat, gets none now (`seated`), and has nothing that was set aside."""
    known = {party for party, count in seats.items() if count}
    known |= {one.request.party for one in seated}
    known |= {one.request.party for one in waiting if one.past is not None}
    found: dict[str, Waiting] = {}
    for one in waiting:
        if one.request.party not in known:
            found.setdefault(one.request.party, one)
    return list(found.values())


def gives_up_seat(streams: Sequence[Stream], newcomer: Waiting) -> Stream | None:
    """The stream whose seat a newcomer takes, never one of a higher rank. Null: it waits, for a stream that has ended or for
    one that ends."""
    if any(not stream.going for stream in streams):
        return None
    seats = seats_of(streams)
    able = [stream for stream in by_age(streams) if stream.request.rank >= newcomer.request.rank]
    most = max((seats[stream.request.party] for stream in able), default=0)
    if most <= 1:
        able = [stream for stream in able if _may_once(stream)]
    return next((stream for stream in reversed(able) if seats[stream.request.party] == most), None)


def _may_once(stream: Stream) -> bool:
    """Whether its party had its first token, and it never gave way."""
    return bool(stream.emitted) and not (stream.past is not None and stream.past.preempted)
