"""When the first round of the next burst may be launched before this one has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.gpu_worker.engine.onward import flies_on
from services.gpu_worker.engine.scheduler import Room
from services.gpu_worker.engine.streams import Stream

FULL = Room(blocks=9, slots=0, batch=0)
OPEN = Room(blocks=9, slots=1, batch=1)


def stream(**changed: Any) -> Stream:
    """One that decodes, far from its end, but for what is `changed`."""
    is_ = {"going": True, "primed": True, "begins_alike": True, "prime_left": 0, "certain": 40, "wanted": 4}
    is_ |= changed
    session = SimpleNamespace(
        primed=is_["primed"],
        begins_alike=is_["begins_alike"],
        prime_left=is_["prime_left"],
        rows_certain=is_["certain"],
        rows_wanted=is_["wanted"],
    )
    return cast("Stream", SimpleNamespace(going=is_["going"], session=session))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, True),
        ({"begins_alike": False}, False),
        ({"certain": 4}, True),
        ({"primed": False, "prime_left": 65}, True),
        ({"primed": False, "prime_left": 64}, False),
    ],
    ids=["decodes", "chooses its drafter", "may end", "is primed further", "has its last chunk"],
)
def test_alone_with_the_card_a_round_flies_unless_somebody_joins_or_begins_otherwise(
    other: dict[str, Any], expected: bool
) -> None:
    active = [stream(), stream(**other)]
    assert flies_on(active, waiting=0, room=OPEN, chunk=64) is expected


@pytest.mark.parametrize(
    ("room", "other", "expected"),
    [
        (FULL, {}, True),
        (OPEN, {}, False),
        (Room(blocks=9, slots=0, batch=1), {}, True),
        (FULL, {"certain": 4}, False),
        (FULL, {"going": False}, False),
    ],
    ids=["every seat is kept", "a seat is free", "no slot is free", "one may end", "one has ended"],
)
def test_beside_a_line_a_round_flies_only_where_nobody_can_go_in(
    room: Room, other: dict[str, Any], expected: bool
) -> None:
    active = [stream(), stream(**other)]
    assert flies_on(active, waiting=1, room=room, chunk=64) is expected
