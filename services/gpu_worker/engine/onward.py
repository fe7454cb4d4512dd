"""Whether the first round of the next burst may be launched before the host has ended this one. Pure: a picture of the engine
in, a guess out.

The guess is that the next burst begins with the same streams and nothing before it touches what they have on the device. A
wrong one costs the time of a round, which then was for nobody (`whole`), and never a bit of a stream; so the round flies where
that is unlikely, and not where it is known: a prompt that ends joins the burst, a stream that ends lets somebody in, a
checkpoint is read from the rows as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.gpu_worker.engine.scheduler import Room
from services.gpu_worker.engine.streams import Stream


def flies_on(active: Sequence[Stream], *, waiting: int, room: Room, chunk: int) -> bool:
    """Asked before the last round of a burst. `waiting` stand in the line, `room` is what they would find now, and a step
    primes at most `chunk` rows."""
    if waiting and (_admits(room) or not all(_stays(stream) for stream in active)):
        return False
    return all(_goes_on_alike(stream, chunk) for stream in active)


def _admits(room: Room) -> bool:
    return room.batch > 0 and room.slots > 0


def _stays(stream: Stream) -> bool:
    """Whether it surely has its seat after a round, but for a stop id."""
    return stream.going and stream.session.rows_certain > stream.session.rows_wanted


def _goes_on_alike(stream: Stream, chunk: int) -> bool:
    session = stream.session
    return session.begins_alike if session.primed else session.prime_left > chunk
