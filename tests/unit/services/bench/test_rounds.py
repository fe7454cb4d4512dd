"""Counting rounds along a known stream says what a verify of the same drafts would."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from services.bench.counts import Counts
from services.bench.rounds import count_rounds


@given(
    stream=st.lists(st.integers(0, 1), min_size=3, max_size=40),
    guesses=st.lists(st.integers(0, 1), min_size=50, max_size=50),
    first=st.integers(1, 2),
    spare=st.integers(0, 6),
    k=st.integers(1, 7),
)
@settings(deadline=None, max_examples=200)
def test_rounds_are_those_of_a_verify(
    stream: list[int], guesses: list[int], first: int, spare: int, k: int
) -> None:
    """`spare` = tokens that the budget would still allow where a stop id ends the stream."""
    end = len(stream) + spare

    def propose(anchor: int, count: int) -> Sequence[int]:
        return guesses[anchor : anchor + count]

    counts = count_rounds(propose, stream, first, end, k)
    at, rounds, accepted = first, 0, 0
    while at < len(stream) - 1:
        drafts = propose(at, min(k, end - at - 2))
        while drafts and at + 1 < len(stream) and drafts[0] == stream[at + 1]:
            at, drafts, accepted = at + 1, drafts[1:], accepted + 1
        at, rounds = at + 1, rounds + 1
    assert (counts.rounds, sum(counts.accepted_at)) == (rounds, accepted)
    assert counts.tokens == len(stream) - 1 - first
    assert counts.rounds <= counts.tokens <= counts.rounds * (k + 1)


def test_perfect_drafts_take_as_few_rounds_as_their_width_allows() -> None:
    stream = list(range(20))
    counts = count_rounds(lambda at, count: stream[at + 1 : at + 1 + count], stream, 3, 20, 3)
    assert (counts.rounds, counts.tokens) == (4, 16)
    assert counts.tokens_per_verify == 4.0
    assert counts.accepted_at == counts.drafted_at == (4, 4, 4)


def test_counts_add_up_position_by_position() -> None:
    one = Counts(
        streams=1, rounds=2, tokens=5, drafted_at=(2, 2), accepted_at=(2, 1), timed_tokens=4, seconds=2.0
    )
    other = Counts(streams=1, rounds=3, tokens=3, drafted_at=(1,), accepted_at=(0,))
    both = one + other
    assert (both.streams, both.rounds, both.tokens) == (2, 5, 8)
    assert (both.drafted_at, both.accepted_at) == ((3, 2), (2, 1))
    assert both.figures()["acceptance_by_position"] == [0.667, 0.5]
    assert both.tokens_per_verify == 1.6
    assert both.cpu_rate == 2.0


def test_streams_that_a_prefill_ends_bring_one_token_a_verify() -> None:
    assert Counts(streams=3).tokens_per_verify == 1.0
    assert Counts(streams=3).figures()["tokens_per_cpu_second"] == 0.0
