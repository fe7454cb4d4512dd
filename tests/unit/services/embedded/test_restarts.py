"""RestartPolicy: bounded, backed off, forgiving with time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.embedded.restarts import RestartPolicy

POLICY = RestartPolicy(limit=3, window_s=60.0, backoff_s=0.5, backoff_limit_s=1.5)
SECOND = 1_000_000_000


def test_delays_double_up_to_the_limit_then_it_gives_up() -> None:
    delays = [POLICY.decide(tuple(range(count)), now_ns=SECOND) for count in range(4)]
    assert delays == [0.5, 1.0, 1.5, None]


def test_old_restarts_are_forgiven() -> None:
    assert POLICY.decide((0, 1, 2), now_ns=61 * SECOND) == 0.5


@given(st.lists(st.integers(0, 600), max_size=30))
def test_never_more_than_the_limit_within_a_window(crashes: list[int]) -> None:
    """Whatever the crash times, any window holds at most `limit` restarts."""
    restarts: tuple[int, ...] = ()
    for second in sorted(crashes):
        now = second * SECOND
        if POLICY.decide(restarts, now) is not None:
            restarts = (*restarts, now)
    for start in restarts:
        assert sum(start <= at < start + 60 * SECOND for at in restarts) <= POLICY.limit
