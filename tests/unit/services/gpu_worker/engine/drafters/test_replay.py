"""The journal as a drafter."""

from __future__ import annotations

from services.gpu_worker.engine.drafters.replay import ReplayDrafter


def test_it_proposes_what_stood_there_and_nothing_beyond() -> None:
    drafter = ReplayDrafter([5, 6, 7])
    assert drafter.propose(1, 8) == [6, 7]
    assert drafter.propose(0, 2) == [5, 6]
    assert drafter.propose(3, 2) == []
    assert [drafter.expected(index) for index in range(4)] == [5, 6, 7, None]
