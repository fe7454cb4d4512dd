"""Blocks are taken as a stream decodes; when they run out the youngest gives way, comes back and says the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Admitted, Captured, Event, FinishReason, Parked
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sequence import SequenceState
from shared.errors import ContextLengthExceeded, EngineFault
from tests.engine_kit import GREEDY, WARM, Driver, baseline, build, cold, prompt, request

BUDGET = 100
TIGHT = EngineLimits(decode_reserve=1, burst_rounds=4)


def item(number: int, **fields: object) -> GenerateRequest:
    params = replace(WARM, seed=number) if number % 2 else GREEDY
    fields = {"max_tokens": BUDGET, "sampling": params, "speculation_k": 3} | fields
    return request(prompt(60 + 30 * number, number), f"r{number}", **fields)


def preempted(events: list[Event]) -> list[str]:
    return [event.request_id for event in events if isinstance(event, Parked) and event.preempted]


def until_gone(driver: Driver, name: str | None = None) -> list[str]:
    """Step until somebody (`name`) gave way; answers who did."""
    for _ in range(300):
        gone = preempted(driver.events)
        if name in gone or (gone and name is None):
            return gone
        driver.step()
    raise AssertionError("nobody gave way")


def tight(**sizes: int) -> Engine:
    return build(limits=TIGHT, **({"num_blocks": 8} | sizes))


@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_fr_18_streams_that_give_way_come_back_and_say_the_same_at_every_k(k: int) -> None:
    engine = tight()
    driver = Driver(engine)
    items = [item(number, speculation_k=k) for number in range(4)]
    outcomes = driver.run(items)
    gone = preempted(driver.events)
    assert gone
    assert "r0" not in gone, "the oldest never gives way"
    assert (engine.stats().preempted, engine.stats().set_aside) == (len(gone), len(gone))
    for chosen in items:
        outcome = outcomes[chosen.key]
        assert outcome.tokens == cold(chosen.tokens, max_tokens=BUDGET, sampling=chosen.sampling)
        assert outcome.end.reason is FinishReason.LENGTH
        offsets = [burst.offset for burst in outcome.bursts]
        assert offsets == sorted(set(offsets)), "nothing comes twice"
    assert sum(isinstance(event, Admitted) for event in driver.events) == len(items)
    baseline(engine)


def test_fr_18_what_was_given_back_can_not_be_written_to() -> None:
    engine = tight(num_blocks=4)
    driver = Driver(engine)
    seen: dict[str, SequenceState] = {}
    driver.submit(item(0))
    driver.submit(item(1))
    driver.step()
    seen |= {stream.request.request_id: stream.session.sequence for stream in engine._active}
    (name,) = until_gone(driver)
    old = seen[name]
    assert old.guard.released
    with pytest.raises(EngineFault):
        old.ssm_slot_idx()
    with pytest.raises(EngineFault):
        old.commit([1] * (old.rows_left + 1))
    driver.run()
    baseline(engine)


def test_fr_51_cached_tokens_stay_those_of_the_first_admission() -> None:
    engine = tight(num_blocks=5)
    driver = Driver(engine)
    items = [item(number) for number in range(4)]
    outcomes = driver.run(items)
    twice = {name for name in preempted(driver.events) if preempted(driver.events).count(name) > 1}
    assert twice
    for chosen in items:
        outcome = outcomes[chosen.key]
        assert outcome.end.cached_tokens == outcome.cached_tokens <= outcome.end.prompt_tokens
        assert outcome.cached_tokens == 0


def test_fr_107_who_gave_way_is_exempt_from_the_limit_of_the_queue() -> None:
    engine = build(limits=replace(TIGHT, max_waiting=2), num_blocks=5, max_batch=2)
    driver = Driver(engine)
    for number in range(2):
        driver.submit(item(number))
        driver.step()
    for number in range(2, 4):
        driver.submit(item(number))
    until_gone(driver)
    assert engine.stats().waiting == 3
    outcomes = driver.run()
    assert {outcome.end.reason for outcome in outcomes.values()} == {FinishReason.LENGTH}
    order = [event.request_id for event in driver.events if isinstance(event, Admitted)]
    assert order == ["r0", "r1", "r2", "r3"], "it comes back before those who never ran"
    baseline(engine)


def test_fr_16_a_request_that_fills_the_pool_runs_and_one_row_more_is_refused() -> None:
    engine = build(limits=TIGHT, num_blocks=6)
    assert engine.window == 6 * 64
    full = request(prompt(5 * 64 + 3), "full", max_tokens=61, speculation_k=5)
    with pytest.raises(ContextLengthExceeded) as refused:
        engine.submit(replace(full, max_tokens=62))
    assert "384" in str(refused.value)
    driver = Driver(engine)
    outcome = driver.run([full])[full.key]
    assert outcome.tokens == cold(full.tokens, max_tokens=61)
    assert not preempted(driver.events)
    baseline(engine)


def test_fr_19_a_prime_that_gives_way_finds_what_it_had_computed() -> None:
    """The old stream asks for its second block when 320 rows of the young one's prompt are in the cache."""
    engine = build(
        limits=EngineLimits(decode_reserve=1, busy_burst_rounds=16), num_blocks=10, prefill_chunk=64
    )
    driver = Driver(engine)
    driver.submit(request(prompt(40, 1), "old", max_tokens=120))
    driver.step()
    young = request(prompt(500, 2), "young")
    driver.submit(young)
    until_gone(driver, "young")
    (kept,) = [
        event for event in driver.events if isinstance(event, Captured) and event.request_id == "young"
    ]
    assert 64 <= kept.position < 448
    outcomes = driver.run()
    primed = engine.stats().prefill_tokens
    assert primed == 40 + 500, "no row of the prompt was computed twice"
    assert outcomes[young.key].tokens == cold(young.tokens)
    assert outcomes[young.key].end.cached_tokens == 0
    baseline(engine)


def test_idle_entries_go_before_a_stream_gives_way() -> None:
    engine = tight(num_blocks=8)
    driver = Driver(engine)
    driver.run([request(prompt(200, 9), "before")])
    assert engine.stats().blocks.cached == 3
    driver.run([item(0), item(0, max_tokens=60)][:1])
    assert not preempted(driver.events)
    chosen = [item(1), replace(item(2), max_tokens=40)]
    driver.run(chosen)
    assert not preempted(driver.events)
    assert engine.stats().blocks.cached < 8
    baseline(engine)


def test_a_stream_alone_takes_the_hits_of_those_who_wait() -> None:
    """What waits holds entries that nobody may evict; the stream that runs needs their blocks to go on."""
    engine = build(limits=TIGHT, num_blocks=7, max_batch=1)
    driver = Driver(engine)
    shared = prompt(200, 5)
    driver.run([request(shared, "before", max_tokens=2)])
    long = request(prompt(50, 6), "long", max_tokens=300)
    driver.submit(long)
    driver.step()
    again = request(shared, "again", max_tokens=2)
    driver.submit(again)
    outcomes = driver.run()
    assert outcomes[long.key].tokens == cold(long.tokens, max_tokens=300)
    assert outcomes[again.key].tokens == cold(shared, max_tokens=2)
    assert outcomes[again.key].cached_tokens == 0
    baseline(engine)
