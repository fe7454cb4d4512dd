"""The medley: the drafter that has been bringing the most is asked, the others now and then."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.drafters.medley import EARLY_PROBES, PROBE_TURNS, Cost, Expected, Medley
from services.gpu_worker.engine.requests import DrafterKind

EXPECTED: dict[DrafterKind, Expected] = {
    "block": Expected(Cost(0.8, 0.05), 1.6),
    "mtp": Expected(Cost(0.0, 0.35), 1.4),
    "ngram": Expected(Cost(0.0, 0.05), 1.2),
}


def played(worth: dict[str, int], rounds: int, *, first: DrafterKind = "block") -> tuple[Medley, list[str]]:
    """Rounds in which each drafter's first `worth` drafts stand; answers who was asked."""
    medley, asked = Medley(EXPECTED, most=7, first=first), []
    for _ in range(rounds):
        turn = medley.next()
        asked.append(turn)
        width = medley.width()
        medley.observe(width, min(width, worth[turn]))
    return medley, asked


def test_the_one_that_brings_most_for_its_cost_is_preferred() -> None:
    for best in EXPECTED:
        worth = dict.fromkeys(EXPECTED, 0) | {best: 6}
        medley, asked = played(worth, 200)
        assert medley.preferred == best
        assert asked[-24:].count(best) == 24 - 24 // PROBE_TURNS


def test_a_probe_goes_to_the_least_recently_asked() -> None:
    medley = Medley(dict.fromkeys(EXPECTED, Expected(Cost(0.0, 0.1), 1.2)), most=7, first="block")
    asked = []
    for _ in range(4 * PROBE_TURNS):
        asked.append(medley.next())
        medley.observe(medley.width(), 7 if asked[-1] == "block" else 0)
    regular = [asked[number] for number in range(PROBE_TURNS - 1, len(asked), PROBE_TURNS)]
    assert regular in (["mtp", "ngram"] * 2, ["ngram", "mtp"] * 2)
    assert asked.count("block") == len(asked) - len(regular), "those far behind are not tried early"


def test_those_that_come_near_are_tried_early() -> None:
    medley = Medley(dict.fromkeys(EXPECTED, Expected(Cost(0.0, 0.1), 1.2)), most=7, first="block")
    asked = []
    for _ in range(PROBE_TURNS - 1):
        asked.append(medley.next())
        medley.observe(7, 1)
    others = [number for number, name in enumerate(asked) if name != "block"]
    assert tuple(others) == EARLY_PROBES


def test_those_far_behind_are_not_tried_early() -> None:
    expected = {"block": Expected(Cost(0.8, 0.05), 2.6), "mtp": Expected(Cost(0.0, 0.35), 1.5)}
    medley = Medley(expected, most=7, first="block")  # type: ignore[arg-type]
    asked = []
    for _ in range(PROBE_TURNS):
        asked.append(medley.next())
        medley.observe(medley.width(), 7)
    assert asked == ["block"] * (PROBE_TURNS - 1) + ["mtp"]


def test_a_turn_of_many_rounds_is_one_turn() -> None:
    medley, asked = Medley(EXPECTED, most=7, first="block"), []
    for _ in range(2 * PROBE_TURNS):
        asked.append(medley.next())
        for _ in range(8):
            medley.observe(medley.width(), 7 if asked[-1] == "block" else 0)
    assert [asked[number] for number in (PROBE_TURNS - 1, 2 * PROBE_TURNS - 1)] in (
        ["mtp", "ngram"],
        ["ngram", "mtp"],
    )
    assert asked.count("block") >= 2 * PROBE_TURNS - 2 - len(EARLY_PROBES)


def offered(medley: Medley, worth: int, rounds: int) -> list[bool]:
    """An index that has seven drafts in every round, of which `worth` stand; a block's seven all stand."""
    taken = []
    for _ in range(rounds):
        medley.next()
        taken.append(medley.offer("ngram", 7))
        drafts = 7 if taken[-1] else medley.width()
        medley.observe(drafts, worth if taken[-1] else min(drafts, 2))
    return taken


def test_an_index_offers_drafts_that_it_has_at_hand() -> None:
    medley = Medley(EXPECTED, most=7, first="block")
    before = medley.rates["ngram"]
    taken = offered(medley, 7, 11)
    assert not taken[0], "the first round is the chosen one's"
    assert taken.count(True) > 6
    assert medley.rates["ngram"] == before, "rounds that it chose say nothing of the others"


def test_an_index_whose_drafts_fall_is_soon_taken_no_more() -> None:
    taken = offered(Medley(EXPECTED, most=7, first="block"), 0, 40)
    assert taken.count(True) < 4


def test_a_short_stream_finds_the_better_one() -> None:
    """Sixteen rounds are an answer of a hundred tokens."""
    medley, asked = played({"block": 7, "mtp": 3, "ngram": 0}, 16, first="mtp")
    assert medley.preferred == "block"
    assert asked[3:].count("block") > 9


def test_more_tokens_a_verify_are_not_more_tokens_a_second() -> None:
    """Three drafts of the head that stand cost more than two of the index."""
    medley, _ = played({"block": 0, "mtp": 3, "ngram": 2}, 200)
    assert medley.preferred == "ngram"


def test_a_passage_that_suits_another_is_noticed() -> None:
    medley = Medley(EXPECTED, most=7, first="mtp")
    for good in ("mtp", "ngram", "block"):
        for _ in range(150):
            turn = medley.next()
            width = medley.width()
            medley.observe(width, width if turn == good else 0)
        assert medley.preferred == good


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 7), max_size=60), st.sampled_from(sorted(EXPECTED)))
def test_it_is_a_function_of_the_counts(luck: list[int], first: DrafterKind) -> None:
    one, other = (Medley(EXPECTED, most=7, first=first) for _ in range(2))
    for accepted in luck:
        assert one.next() == other.next()
        width = one.width()
        assert 0 <= width == other.width() <= 7
        for medley in (one, other):
            medley.observe(width, min(accepted, width))
        assert one.rates == other.rates
        assert all(rate >= 0 for rate in one.rates.values())


def test_a_drafter_alone_is_always_asked() -> None:
    medley = Medley({"ngram": EXPECTED["ngram"]}, most=3, first="ngram")
    for _ in range(40):
        assert medley.next() == "ngram"
        medley.observe(0, 0)
