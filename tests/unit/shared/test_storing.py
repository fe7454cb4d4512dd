"""Whether a stream takes what is written, as a process believes it."""

from __future__ import annotations

from shared.clock import ManualClock
from shared.storing import StoreHealth


def test_fr_101_a_fault_is_believed_for_a_while() -> None:
    """An unready worker is sent nothing: only a new try tells whether there is room."""
    clock = ManualClock()
    health = StoreHealth(clock, "the journal", hold_s=30)
    assert health.fault is None
    health.gave_up("overloaded")
    clock.advance(29)
    assert health.fault is not None
    clock.advance(1)
    assert health.fault is None
    health.gave_up("overloaded")
    health.stored()
    assert health.fault is None
