"""Several parties share the seats: a newcomer waits for a burst, not for a request; nobody's stream changes for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Burst, FinishReason, Parked
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.seats import in_turn
from services.gpu_worker.engine.waiting import Past, Waiting
from tests.engine_kit import GREEDY, WARM, Driver, baseline, build, cold, prompt, request

SEATS = 3
BUDGET = 20
LIMITS = EngineLimits(burst_rounds=2, decode_ckpt_blocks=1)


def item(party: str, number: int, **fields: object) -> GenerateRequest:
    params = replace(WARM, seed=number) if number % 2 else GREEDY
    fields = {"max_tokens": BUDGET, "sampling": params, "speculation_k": 3} | fields
    seed = number + 100 * sum(party.encode())
    return request(prompt(40 + 5 * number, seed), f"{party}{number}", party=party, **fields)


def engine_of(**sizes: int) -> Engine:
    return build(limits=LIMITS, **({"max_batch": SEATS} | sizes))


def flooded(engine: Engine, count: int = 5) -> tuple[Driver, list[GenerateRequest]]:
    """One party has all seats and the line."""
    driver = Driver(engine)
    items = [item("a", number) for number in range(count)]
    for one in items:
        driver.submit(one)
    for _ in range(2):
        driver.step()
    assert engine.stats().decoding == SEATS
    return driver, items


def bursts_until_first(driver: Driver, name: str) -> int:
    """Steps until the first token of a request; each runs one burst."""
    for steps in range(1, 200):
        if any(isinstance(event, Burst) and event.request_id == name for event in driver.step()):
            return steps
    raise AssertionError(f"{name} does not begin")


def set_aside(driver: Driver) -> list[str]:
    return [event.request_id for event in driver.events if isinstance(event, Parked) and event.preempted]


def finish(driver: Driver, items: list[GenerateRequest]) -> None:
    """Everything ends, with the tokens that each has alone, and everything is given back."""
    outcomes = driver.run()
    for one in items:
        outcome = outcomes[one.key]
        assert outcome.end.reason is FinishReason.LENGTH
        assert outcome.tokens == cold(one.tokens, max_tokens=one.max_tokens, sampling=one.sampling)
    baseline(driver.engine)


def test_c6_a_newcomers_first_token_comes_with_the_next_burst_however_much_another_has_queued() -> None:
    engine = engine_of()
    driver, items = flooded(engine)
    first = item("b", 1)
    driver.submit(first)
    assert bursts_until_first(driver, "b1") == 1
    assert set_aside(driver) == ["a2"], "the youngest of who has most gives way"
    finish(driver, [*items, first])


def test_each_newcomer_takes_one_seat_and_the_shares_even_out() -> None:
    engine = engine_of()
    driver, items = flooded(engine)
    more = [item("b", 1), item("b", 2), item("c", 1)]
    for one in more:
        driver.submit(one)
    assert bursts_until_first(driver, "b1") == 1
    assert set_aside(driver) == ["a2", "a1"]
    running = Counter(stream.request.party for stream in engine._active)
    assert running == {"a": 1, "b": 1, "c": 1}
    finish(driver, [*items, *more])


def test_where_each_has_one_seat_a_stream_gives_way_once() -> None:
    engine = engine_of()
    driver = Driver(engine)
    items = [item(party, 1) for party in "abc"]
    for one in items:
        driver.submit(one)
    driver.step()
    for party in "def":
        items.append(item(party, 1))
        driver.submit(items[-1])
        driver.step()
    driver.run()
    gone = set_aside(driver)
    assert gone, "somebody gave way"
    assert max(Counter(gone).values()) == 1
    finish(driver, items)


def test_a_newcomer_takes_no_seat_of_a_higher_rank() -> None:
    engine = engine_of()
    driver, items = flooded(engine)
    low = item("b", 1, rank=1)
    driver.submit(low)
    driver.step()
    assert not set_aside(driver)
    finish(driver, [*items, low])


def test_a_single_seat_goes_to_a_newcomer_for_its_first_burst_too() -> None:
    engine = engine_of(max_batch=1)
    driver = Driver(engine)
    items = [item("a", number) for number in range(3)]
    for one in items:
        driver.submit(one)
    driver.step()
    driver.step()
    first = item("b", 1)
    driver.submit(first)
    assert bursts_until_first(driver, "b1") == 1
    finish(driver, [*items, first])


def test_one_party_alone_is_first_come_first_served() -> None:
    engine = engine_of()
    driver, items = flooded(engine)
    finish(driver, items)
    assert not set_aside(driver)


def test_a_newcomer_gets_pages_that_eviction_cannot_bring() -> None:
    """Seats are free; the pages are one party's, all in use."""
    engine = engine_of(num_blocks=6, max_batch=4)
    driver = Driver(engine)
    items = [item("a", number, max_tokens=100) for number in (0, 2, 4)]
    for one in items:
        driver.submit(one)
    while engine.stats().blocks.free:
        driver.step()
    first = item("b", 1, max_tokens=8)
    driver.submit(first)
    assert bursts_until_first(driver, "b1") <= 2
    assert set_aside(driver)
    finish(driver, [*items, first])


@pytest.mark.parametrize("greedy", [1, 3])
def test_nobody_waits_for_more_than_a_burst_of_each_other_party(greedy: int) -> None:
    engine = engine_of()
    driver = Driver(engine)
    items = [item(f"g{party}", number) for number in range(4 - greedy + 1) for party in range(greedy)]
    for one in items:
        driver.submit(one)
    for _ in range(3):
        driver.step()
    first = item("new", 1)
    driver.submit(first)
    assert bursts_until_first(driver, "new1") <= greedy
    finish(driver, [*items, first])


WAITING = st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    line=WAITING, seats=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4)), count=st.integers(1, 6)
)
def test_turns_go_to_who_has_fewest_and_keep_the_order_of_each(
    line: list[tuple[str, bool]], seats: dict[str, int], count: int
) -> None:
    waiting = [_waiting(place, party, back) for place, (party, back) in enumerate(line)]
    chosen = in_turn(waiting, seats, count)
    assert len(chosen) == min(count, len(waiting))
    has = Counter(seats)
    left = list(waiting)
    for one in chosen:
        fewest = min(has[other.request.party] for other in left)
        assert has[one.request.party] == fewest
        assert one is next(other for other in left if has[other.request.party] == fewest)
        has[one.request.party] += 1
        left.remove(one)


def _waiting(place: int, party: str, back: bool) -> Waiting:
    from services.gpu_worker.engine.events import SpecTelemetry
    from services.gpu_worker.engine.sessions.telemetry import SessionCounters

    past = (
        Past(counters=SessionCounters(), told=SpecTelemetry(), retries=0, cached_tokens=0) if back else None
    )
    return Waiting(
        request=request(prompt(8, place), f"r{place}", party=party), since_ns=0, past=past, number=place
    )
