"""What followed last time: the indexes of a stream and of a namespace."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.drafters.ngram import (
    MAX_MATCH,
    MIN_MATCH,
    MOST_TRIED,
    NamespaceIndex,
    NgramDrafter,
    SuffixIndex,
)

NOTHING = torch.zeros(0, 1)
ROOT, OTHER = b"a" * 32, b"b" * 32


def drafter(prompt: list[int], shared: NamespaceIndex | None = None, root: bytes = ROOT) -> NgramDrafter:
    return NgramDrafter(prompt, root, shared if shared is not None else NamespaceIndex())


def test_it_says_what_followed_last_time() -> None:
    assert drafter([1, 2, 3, 4, 9, 1, 2]).propose(3) == [3, 4, 9]


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    assert drafter([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2]).propose(1) == [5]


def test_the_latest_of_equal_matches_wins() -> None:
    assert drafter([1, 2, 5, 1, 2, 6, 1, 2]).propose(1) == [6]


def test_a_period_goes_on() -> None:
    assert drafter([1, 2, 3, 1, 2, 3]).propose(7) == [1, 2, 3, 1, 2, 3, 1]
    assert drafter([4, 4, 4]).propose(3) == [4, 4, 4]


def test_one_token_alike_is_no_match() -> None:
    assert drafter([1, 2, 3, 1]).propose(3) == []
    assert drafter([]).propose(3) == []


def test_completion_tokens_count_as_they_come() -> None:
    one = drafter([1, 2, 3])
    assert one.propose(2) == []
    one.observe(3, [8, 2, 3], NOTHING)
    assert one.propose(2) == [8, 2]
    assert one.propose(0) == []


def test_c4_what_was_said_is_known_inside_its_namespace_alone() -> None:
    shared = NamespaceIndex()
    shared.learn(ROOT, [1, 2, 3, 4, 5, 6, 7, 8], start=5)
    assert drafter([1, 2, 3, 4, 5], shared).propose(2) == [6, 7]
    assert drafter([2, 3, 4, 5, 6], shared).propose(4) == [7, 8]
    assert drafter([1, 2, 3, 4, 5], shared, OTHER).propose(2) == []


def test_only_continuations_that_were_said_are_learnt() -> None:
    shared = NamespaceIndex()
    shared.learn(ROOT, [1, 2, 3, 4, 5, 6, 7, 8], start=7)
    assert shared.find(ROOT, (1, 2, 3, 4, 5), 1) == []
    assert shared.find(ROOT, (3, 4, 5, 6, 7), 1) == [8]
    assert len(shared) == 1


def test_own_text_wins_over_the_namespace_at_equal_length() -> None:
    shared = NamespaceIndex()
    shared.learn(ROOT, [1, 2, 3, 4, 5, 99], start=5)
    assert drafter([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5], shared).propose(1) == [6]
    assert drafter([4, 5, 6, 1, 2, 3, 4, 5], shared).propose(1) == [99], "five tokens there beat two here"


def test_the_namespaces_are_bounded_and_do_not_push_each_other_out() -> None:
    shared = NamespaceIndex(roots=2, runs=4)
    shared.learn(ROOT, [1, 2, 3, 4, 5, 6], start=5)
    shared.learn(OTHER, list(range(100, 200)), start=5)
    assert len(shared) == 5
    assert shared.find(ROOT, (1, 2, 3, 4, 5), 1) == [6]
    assert shared.find(OTHER, tuple(range(194, 199)), 1) == [199], "the latest runs stay"
    assert shared.find(OTHER, tuple(range(100, 105)), 1) == []
    shared.learn(b"c" * 32, [1, 2, 3, 4, 5, 6], start=5)
    assert shared.find(ROOT, (1, 2, 3, 4, 5), 1) == [], "the namespace that was used longest ago"
    assert shared.find(OTHER, tuple(range(194, 199)), 1) == [199]


@given(tokens=st.lists(st.integers(0, 3), max_size=40), cut=st.integers(0, 40), k=st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_the_index_agrees_with_a_search(tokens: list[int], cut: int, k: int) -> None:
    index = SuffixIndex(tokens[:cut])
    index.extend(tokens[cut:])
    found = index.match(MIN_MATCH, MAX_MATCH)
    wanted = None
    for length in range(MAX_MATCH, MIN_MATCH - 1, -1):
        ends = [
            end
            for end in range(length, len(tokens))
            if tokens[end - length : end] == tokens[len(tokens) - length :]
        ]
        if ends:
            wanted = ends[-1]
            break
    assert found == wanted
    if found is not None:
        text = list(tokens)
        for offset in range(k):
            text.append(text[found + offset])
        assert index.follow(found, k) == text[len(tokens) :]


def test_an_index_costs_two_numbers_and_at_most_one_entry_a_token() -> None:
    index = SuffixIndex(range(1000))
    assert (len(index._newest), len(index._older)) == (998, 1000)
    index.extend([1, 2] * 500)
    assert (len(index._newest), len(index._older)) == (1001, 2000)


def test_a_proposal_looks_at_few_places_however_long_the_text() -> None:
    """The five tokens stood long ago; since then their last two came again and again after others."""
    often = [token for number in range(MOST_TRIED) for token in (100 + number, 4, 5, 200 + number)]
    assert SuffixIndex([1, 2, 3, 4, 5, 9, *often[4:], 1, 2, 3, 4, 5]).match(MAX_MATCH, MAX_MATCH) == 5
    assert SuffixIndex([1, 2, 3, 4, 5, 9, *often, 1, 2, 3, 4, 5]).match(MAX_MATCH, MAX_MATCH) is None
