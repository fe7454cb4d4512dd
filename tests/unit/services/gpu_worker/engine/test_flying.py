"""A round that flies from one burst into the next: when it is launched, who it waits for, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sessions.auto import AutoSpecSession
from shared.errors import EngineFault
from tests.card_kit import Flights, play_card
from tests.engine_kit import Driver, baseline, build, cold, prompt, request

LIMITS = EngineLimits(burst_rounds=4, decode_ckpt_blocks=0)


def streams(count: int, **fields: int) -> list[GenerateRequest]:
    return [
        request(prompt(40 + 11 * number, number), f"{number}", **({"max_tokens": 40} | fields))
        for number in range(count)
    ]


@cache
def _alone(tokens: tuple[int, ...]) -> list[int]:
    return cold(tokens, max_tokens=150)


def alone(item: GenerateRequest) -> list[int]:
    """A stream with a larger budget says the same, and more."""
    return _alone(item.tokens)[: item.max_tokens]


class At(Faults):
    """Does something at the n-th verify."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self.number, self.act, self.count = number, act, 0

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self.count += phase == "verify"
        if phase == "verify" and self.count == self.number:
            self.act()


class Always(Faults):
    """Does something at every launch."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self.act()


class AtChunks(Faults):
    """Does something at every launch of prompt rows."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        if phase == "prefill":
            self.act()


class GivesWay(Faults):
    """One stream gives way, once it has so many rows."""

    def __init__(self, name: str, rows: int) -> None:
        self.name, self.rows, self.done = name, rows, False

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        now = stream[0] == self.name and rows >= self.rows and not self.done
        self.done = self.done or now
        return now


def fly(driver: Driver, flights: Flights, items: Sequence[GenerateRequest]) -> None:
    """Until all of them are in a round that flies on."""
    for item in items:
        driver.submit(item)
    for _ in range(20):
        driver.step()
        if len(flights.flying) == len(items):
            return
    raise AssertionError("no round of all of them flew on")


def ends_as_alone(driver: Driver, items: Sequence[GenerateRequest]) -> None:
    driver.run()
    for item in items:
        assert driver.outcomes[item.key].tokens == alone(item)
    baseline(driver.engine)


def test_bursts_follow_one_another_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round but the first is launched before the host has read the one before, up to the end of the last stream."""
    flights = play_card(monkeypatch)
    driver, items = Driver(build(limits=LIMITS)), streams(3)
    fly(driver, flights, items)
    asked = flights.asked
    while driver.engine.has_work():
        driver.step()
        going = {stream.session.sequence.slot_idx for stream in driver.engine._active}
        assert flights.flying == going
    assert (flights.asked, flights.landed) == (asked, 0)
    ends_as_alone(driver, items)


def test_where_somebody_waits_a_round_flies_on_while_every_seat_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is admitted joins the burst, and what flew would be for nobody: none flies where a budget may end a stream."""
    flights = play_card(monkeypatch)
    driver, items = Driver(build(limits=LIMITS, max_batch=2)), streams(3)
    for item in items:
        driver.submit(item)
    flew = 0
    while driver.engine.stats().waiting:
        driver.step()
        flew += bool(flights.flying)
    assert flew > 5
    assert flights.landed == 0
    ends_as_alone(driver, items)


def test_where_somebody_waits_for_blocks_alone_no_round_flies_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eviction, or a stream's end, may let it in at any step."""
    flights = play_card(monkeypatch)
    driver, items = Driver(build(limits=LIMITS, num_blocks=4)), streams(2)
    items.append(request(prompt(150, 9), "long", max_tokens=5))
    for item in items:
        driver.submit(item)
    while driver.engine.stats().waiting:
        driver.step()
        assert not (flights.flying and driver.engine.stats().waiting)
    assert flights.landed == 0
    ends_as_alone(driver, items)


def test_a_newcomer_joins_after_one_round_that_was_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    flights = play_card(monkeypatch)
    driver, items = Driver(build(limits=LIMITS)), streams(3)
    fly(driver, flights, items[:2])
    driver.submit(items[2])
    driver.step()
    assert flights.landed == 1
    assert driver.outcomes[items[2].key].tokens, "its first tokens leave in the step that admitted it"
    ends_as_alone(driver, items)


def test_a_long_prompt_is_primed_beside_rounds_that_fly_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two chunks nothing is for nobody; only the burst that it joins begins anew."""
    flights = play_card(monkeypatch)
    driver, items = Driver(build(limits=LIMITS, prefill_chunk=64)), streams(2, max_tokens=60)
    items.append(request(prompt(500, 9), "long", max_tokens=5))
    fly(driver, flights, items[:2])
    asked = flights.asked
    driver.submit(items[2])
    while not driver.outcomes[items[2].key].tokens:
        driver.step()
    assert (flights.asked, flights.landed) == (asked + 1, 0)
    ends_as_alone(driver, items)


def test_a_cancelled_stream_ends_at_once_and_what_flies_is_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flights = play_card(monkeypatch)
    driver, items = Driver(build(limits=LIMITS)), streams(3)
    fly(driver, flights, items)
    said, used = len(driver.outcomes[items[1].key].tokens), flights.used
    driver.engine.cancel("1", "enough")
    driver.step()
    outcome = driver.outcomes[items[1].key]
    assert (outcome.end.reason, len(outcome.tokens)) == (FinishReason.CANCELLED, said)
    assert flights.used > used
    again = replace(items[1], request_id="again")
    driver.submit(again)
    ends_as_alone(driver, [items[0], items[2], again])


@pytest.mark.parametrize("number", [7, 8, 9, 10])
def test_a_stream_cancelled_in_any_round_gives_its_slot_away_with_nothing_on_its_way(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flights = play_card(monkeypatch)
    faults = At(number, lambda: driver.engine.cancel("0", "enough"))
    driver, items = Driver(build(limits=LIMITS, faults=faults)), streams(2)
    fly(driver, flights, items)
    while driver.outcomes[items[0].key].finished is None:
        driver.step()
    again = replace(items[0], request_id="again")
    driver.submit(again)
    ends_as_alone(driver, [items[1], again])


def test_an_interrupt_ends_the_burst_and_loses_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    flights = play_card(monkeypatch)
    faults = At(7, lambda: driver.engine.interrupt())
    driver, items = Driver(build(limits=replace(LIMITS, burst_rounds=16), faults=faults)), streams(2)
    for item in items:
        driver.submit(item)
    while faults.count < 7:
        driver.step()
    assert faults.count == 7
    assert len(flights.flying) == 2
    ends_as_alone(driver, items)
    assert flights.landed == 0


def test_who_comes_while_a_prompt_is_primed_waits_for_no_round_that_is_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That somebody waits outside is known before the burst: nothing flies on over its end."""
    flights = play_card(monkeypatch)
    faults = AtChunks(lambda: driver.engine.interrupt())
    driver, items = Driver(build(limits=LIMITS, faults=faults, prefill_chunk=64)), streams(3, max_tokens=60)
    items.append(request(prompt(500, 9), "long", max_tokens=5))
    fly(driver, flights, items[:2])
    driver.submit(items[3])
    driver.step()
    assert not flights.flying
    driver.submit(items[2])
    driver.step()
    assert flights.landed == 0
    ends_as_alone(driver, items)


def test_who_gives_way_between_bursts_has_nothing_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    flights = play_card(monkeypatch)
    driver, items = Driver(build(limits=LIMITS, faults=GivesWay("1", 70))), streams(2)
    fly(driver, flights, items)
    ends_as_alone(driver, items)
    assert driver.engine.stats().preempted == 1
    assert flights.landed >= 1


def test_r_q17_a_checkpoint_holds_its_boundarys_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come back from checkpoints that were taken between rounds that flew."""
    flights = play_card(monkeypatch)
    limits = replace(LIMITS, burst_rounds=3, decode_ckpt_blocks=1)
    driver, items = Driver(build(limits=limits, faults=GivesWay("1", 140))), streams(2, max_tokens=110)
    fly(driver, flights, items)
    ends_as_alone(driver, items)
    stats = driver.engine.stats()
    assert (stats.preempted, stats.decoded.restored) == (1, 1)
    assert stats.decoded.kept > 2


def test_r_q17_a_checkpoint_that_falls_due_in_mid_burst_ends_what_flies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every burst is interrupted after a round, with the next one on its way."""
    flights = play_card(monkeypatch)
    limits = replace(LIMITS, burst_rounds=16, decode_ckpt_blocks=1)
    faults = Always(lambda: driver.engine.interrupt())
    driver, items = Driver(build(limits=limits, faults=faults)), streams(2, max_tokens=110)
    fly(driver, flights, items)
    ends_as_alone(driver, items)
    assert driver.engine.stats().decoded.kept >= 2
    assert 1 <= flights.landed <= driver.engine.stats().decoded.kept


def test_r_q17_where_a_checkpoint_is_due_no_round_flies_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    flights = play_card(monkeypatch)
    driver = Driver(build(limits=replace(LIMITS, decode_ckpt_blocks=1)))
    items = streams(2, max_tokens=150)
    outcomes = driver.run(items)
    assert driver.engine.stats().decoded.kept >= 4
    assert flights.landed == 0
    assert [outcomes[item.key].tokens for item in items] == [alone(item) for item in items]


@pytest.mark.parametrize("fault", [OutOfMemory("no room"), EngineFault("broken")], ids=["memory", "fault"])
def test_a_launch_that_fails_with_a_round_on_its_way_leaves_the_engine_usable(
    fault: EngineFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise fault

    flights = play_card(monkeypatch)
    driver, items = Driver(build(limits=LIMITS, faults=At(9, fails))), streams(2)
    fly(driver, flights, items)
    driver.run()
    baseline(driver.engine)
    broken = [item for item in items if driver.outcomes[item.key].end.reason is FinishReason.ERROR]
    assert len(broken) == (0 if isinstance(fault, OutOfMemory) else 2)
    again = [replace(item, request_id=f"again-{item.request_id}") for item in items]
    for item in again:
        driver.submit(item)
    ends_as_alone(driver, [*again, *(item for item in items if item not in broken)])


def test_drafts_of_the_head_fly_on(monkeypatch: pytest.MonkeyPatch) -> None:
    flights = play_card(monkeypatch)
    driver = Driver(build(limits=LIMITS))
    items = [replace(item, speculation_k=2, drafter="mtp") for item in streams(2)]
    fly(driver, flights, items)
    ends_as_alone(driver, items)
    assert flights.used > flights.asked


def test_a_stream_that_chooses_its_drafter_a_burst_begins_each_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    flights = play_card(monkeypatch)
    driver = Driver(build(limits=LIMITS))
    (item,) = (replace(item, speculation_k=2, drafter="auto") for item in streams(1))
    driver.submit(item)
    chose = 0
    while driver.engine.has_work():
        driver.step()
        sessions = [stream.session for stream in driver.engine._active]
        choosing = any(isinstance(session, AutoSpecSession) and not session.demoted for session in sessions)
        assert not (choosing and flights.flying)
        chose += choosing
    assert chose > 0
    assert flights.used > 0
    ends_as_alone(driver, [item])


def test_a_round_is_no_larger_than_those_who_are_left_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds follow one another for as long as nobody joins: the card's launch shrinks as streams end all the same."""
    flights = play_card(monkeypatch)
    driver = Driver(build(limits=LIMITS))
    first, *others = streams(4, max_tokens=30)
    long, drafted = replace(first, max_tokens=60), replace(others[0], speculation_k=2, drafter="mtp")
    for item in (long, drafted, *others[1:]):
        driver.submit(item)
    sizes = set()
    while driver.engine.has_work():
        driver.step()
        sizes |= {flights.size} if flights.size else set()
    assert {(size.sequences, size.head > 0) for size in sizes} >= {(4, True), (1, False)}
    ends_as_alone(driver, [long, drafted, *others[1:]])
