"""Takeover under another fingerprint: only when nobody of the own one is left, after what was delivered, and not as exact."""

from __future__ import annotations

import msgspec

from services.gpu_worker import claim, journal
from services.gpu_worker.neighbours import Neighbours
from shared.clock import ManualClock
from shared.protocol.messages import Frame, Heartbeat, Started
from tests.golden.protocol.examples import example
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, Running, World, make_request, until, world
from tests.unit.services.gpu_worker.scripted import FINGERPRINT, stream

OTHER = "e" * 64
GRACE_S = 30.0


def _beat(fingerprint: str, *, model: str = "m", vocabulary_size: int = 50_000) -> Heartbeat:
    sample = example(Heartbeat)
    assert isinstance(sample, Heartbeat)
    return msgspec.structs.replace(
        sample, fingerprint=fingerprint, model=model, vocabulary_size=vocabulary_size
    )


def _neighbours(clock: ManualClock) -> Neighbours:
    return Neighbours(clock, model="m", fingerprint=FINGERPRINT, vocabulary_size=50_000, grace_s=GRACE_S)


def test_a_fingerprint_is_gone_after_the_grace_without_a_heartbeat() -> None:
    clock = ManualClock()
    known = _neighbours(clock)
    known.note(_beat(OTHER))
    clock.advance(GRACE_S - 1)
    assert not known.gone(OTHER[:16])
    known.note(_beat(OTHER))
    clock.advance(GRACE_S - 1)
    assert not known.gone(OTHER[:16])
    clock.advance(1)
    assert known.gone(OTHER[:16])
    assert not known.gone(FINGERPRINT[:16])


def test_one_that_was_never_heard_is_gone_a_grace_after_the_start() -> None:
    clock = ManualClock()
    known = _neighbours(clock)
    assert not known.gone("d" * 16)
    clock.advance(GRACE_S)
    assert known.gone("d" * 16)


def test_another_models_requests_and_another_vocabularys_are_not_for_us() -> None:
    clock = ManualClock()
    known = _neighbours(clock)
    known.note(_beat("a" * 64, model="another"))
    known.note(_beat("b" * 64, vocabulary_size=7))
    clock.advance(10 * GRACE_S)
    assert not known.gone("a" * 16)
    assert not known.gone("b" * 16)


def test_c1_7_journalled_tokens_of_other_numerics_are_forced_and_a_fresh_request_is_not() -> None:
    fresh = journal.empty(1)
    assert _decide(fresh, adopted=True) == claim.Run(attempt=1)
    theirs = _claimed(fresh, OTHER)
    assert isinstance(_decide(theirs, adopted=False), claim.Refuse)
    assert _decide(theirs, adopted=True) == claim.Run(attempt=2, forced=True)
    both = _claimed(_claimed(fresh, FINGERPRINT), OTHER)
    assert _decide(both, adopted=False) == claim.Run(
        attempt=3, forced=True
    )  # our first claim, their tokens since


def _decide(state: journal.JournalState, *, adopted: bool) -> claim.Verdict:
    request = make_request()
    return claim.decide(
        request,
        state,
        (),
        fingerprint=FINGERPRINT,
        now_ns=request.created_ns,
        max_attempts=5,
        adopted=adopted,
    )


def _claimed(state: journal.JournalState, fingerprint: str) -> journal.JournalState:
    started = Started(
        request_id="r1", attempt=state.attempt + 1, worker_id="w", fingerprint=fingerprint, cached_tokens=0,
        resumed_offsets=(0,), resumed_scores=0, at_ns=1,
    )  # fmt: skip
    return journal.fold(state, state.sequence + 1, started)


async def _abandoned(here: World, running: Running) -> None:
    """The worker has delivered something, and dies."""
    await here.enqueue(make_request(clock=here.clock, max_tokens=40))

    async def begun() -> bool:
        return any(isinstance(one, Frame) for one in await here.journalled())

    await until(begun)
    await running.die()


async def test_c1_7_a_worker_of_other_numerics_goes_on_when_no_other_is_left() -> None:
    async with world() as here:
        await _abandoned(here, await here.worker("w1", budget=2))
        delivered = (await here.tokens())[0]
        second = await here.worker("w2", fingerprint=OTHER)
        here.clock.advance(16)  # delivered again, and its own may come back yet
        assert not second.worker.neighbours.gone(FINGERPRINT[:16])
        assert second.engine.submitted == []
        here.clock.advance(15)
        terminal = await here.terminal()
        assert (terminal.attempt, terminal.worker_id, terminal.exact) == (2, "w2", False)
        (tokens,) = await here.tokens()
        assert tokens[: len(delivered)] == delivered
        assert tokens == stream(PROMPT, SEED, 40)
        assert all(one.journal_stands for one in second.engine.submitted)
        assert second.core.metrics.taken.labels("orphans")._value.get() == 1
        await until(lambda: here.waiting_items() == 0)


async def test_another_models_orphans_are_passed_on() -> None:
    async with world() as here:
        await here.enqueue(make_request(clock=here.clock, model="another"))
        other = await here.worker("w2", fingerprint=OTHER)
        here.clock.advance(31)
        passed = other.core.metrics.taken.labels("orphans")._value
        await until(lambda: passed.get() >= 1 and other.worker.room.taken == 0)
        assert other.engine.submitted == []
        assert await here.journalled() == []
        assert here.waiting_items() == 1


async def test_a_request_of_ours_is_ours_again_when_we_come_back_in_time() -> None:
    async with world() as here:
        await _abandoned(here, await here.worker("w1", budget=2))
        await here.worker("w2", fingerprint=OTHER)
        await here.worker("w3")
        here.clock.advance(16)
        terminal = await here.terminal()
        assert (terminal.worker_id, terminal.exact) == ("w3", True)
