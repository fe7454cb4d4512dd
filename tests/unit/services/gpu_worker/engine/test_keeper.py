"""Decode checkpoints: a stream that was set aside in mid decode comes back without its prompt, and says the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.gpu_worker.engine.cache.decoded import Role
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Parked
from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import SamplingParams
from shared.errors import EngineFault
from tests.engine_kit import GREEDY, WARM, Driver, baseline, build, cold, prompt, request, run_one

PROMPT = prompt(70, 3)
BUDGET = 90
LIMITS = EngineLimits(burst_rounds=1, decode_ckpt_blocks=1)
RICH = replace(WARM, repetition_penalty=1.3, frequency_penalty=0.4)


class WayAt(Faults):
    """The stream gives way once at each of these numbers of rows; or at every step when it has decoded."""

    def __init__(self, rows: Sequence[int] = (), *, always_above: int | None = None) -> None:
        self.rows = sorted(rows)
        self.above = always_above
        self.given = 0

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        every = self.above is not None and rows > self.above
        if every:
            self.above = rows
        once = bool(self.rows) and rows >= self.rows[0]
        if once:
            del self.rows[0]
        self.given += every or once
        return every or once


class LosesVerify(Faults):
    """These verify launches do not fit, counted from 1."""

    def __init__(self, *numbers: int) -> None:
        self.left = list(numbers)
        self.count = 0

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self.count += phase == "verify"
        if phase == "verify" and self.count in self.left:
            self.left.remove(self.count)
            raise OutOfMemory("made to fail")


def checkpoints(engine: Engine) -> list[int]:
    return [decoded.position for decoded in engine._cache.decoded]


@pytest.mark.parametrize("sampling", [GREEDY, RICH], ids=["greedy", "sampled with penalties"])
@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("mtp", 3), ("ngram", 3)])
def test_r_q17_a_stream_that_gives_way_after_every_round_says_the_same_and_primes_once(
    drafter: Any, k: int, sampling: SamplingParams
) -> None:
    faults = WayAt(always_above=len(PROMPT))
    engine = build(limits=LIMITS, faults=faults, num_snapshots=8)
    driver = Driver(engine)
    item = request(
        PROMPT, max_tokens=BUDGET, sampling=sampling, drafter=drafter, speculation_k=k, top_logprobs=2
    )
    outcome = driver.run([item])[item.key]
    alone = run_one(build(), replace(item, use_cache=False, speculation_k=0))
    assert outcome.tokens == alone.tokens
    assert outcome.logprobs == alone.logprobs
    assert faults.given > 20
    assert engine.stats().prefill_tokens == len(PROMPT), "no row of the prompt is computed twice"
    assert engine.stats().decoded.restored == faults.given
    baseline(engine)


def test_r_q17_a_stream_whose_launch_did_not_fit_comes_back_from_its_newest_checkpoint() -> None:
    engine = build(limits=LIMITS, faults=LosesVerify(80))
    item = request(PROMPT, max_tokens=BUDGET)
    outcome = run_one(engine, item)
    assert outcome.tokens == cold(PROMPT, max_tokens=BUDGET)
    stats = engine.stats()
    assert (stats.prefill_tokens, stats.set_aside, stats.decoded.restored) == (len(PROMPT), 1, 1)
    assert 80 < stats.rounds < 100, "only the journal after the checkpoint is verified again"
    baseline(engine)


def test_r_q17_one_boundary_is_checkpointed_once_and_the_newest_is_kept() -> None:
    engine = build(limits=LIMITS)
    driver = Driver(engine)
    item = request(PROMPT, max_tokens=BUDGET)
    driver.submit(item)
    seen: list[int] = []
    while engine.has_work():
        driver.step()
        held = checkpoints(engine)
        assert len(held) <= 1
        seen.extend(position for position in held if position not in seen)
    assert [position // 64 for position in seen] == [2]
    assert engine.stats().decoded.kept == 1
    assert not checkpoints(engine), "it goes with the stream"
    baseline(engine)


def test_r_q17_checkpoints_of_many_streams_come_to_be_taken_together() -> None:
    """One that is due takes those with it that are due a block later; none is ever further apart than the interval."""
    engine = build(limits=replace(LIMITS, decode_ckpt_blocks=2), num_snapshots=16, num_blocks=96)
    driver = Driver(engine)
    for number, length in enumerate((70, 100, 125)):
        driver.submit(request(prompt(length, number), f"{number}", max_tokens=290))
    steps: list[int] = []
    while engine.has_work():
        before = {stream.key: stream.checkpoint for stream in engine._active}
        driver.step()
        taken = [
            stream
            for stream in engine._active
            if stream.key in before and stream.checkpoint is not before[stream.key]
        ]
        for stream in engine._active:
            rows = stream.checkpoint.position if stream.checkpoint else len(stream.request.tokens) // 64 * 64
            assert stream.session.committed_len < rows // 64 * 64 + 3 * 64
        steps += [len(taken)] if taken else []
    assert steps[1:] == [3] * (len(steps) - 1), "after the first time all are taken at once"
    assert len(steps) >= 3
    baseline(engine)


def test_r_q17_no_slot_is_settled_for_a_checkpoint_that_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one checkpoint can be held of three streams, the others cost no launch; the next one has the place once it is
    free."""
    engine = build(limits=replace(LIMITS, max_decoded=1))
    settled: list[int] = []
    flush = engine.runner.flush
    monkeypatch.setattr(engine.runner, "flush", lambda slot: (settled.append(slot), flush(slot)))
    items = [request(prompt(70, number), f"{number}", max_tokens=100 + 60 * number) for number in range(3)]
    outcomes = Driver(engine).run(items)
    assert engine.stats().decoded.kept == len(settled)
    assert len(set(settled)) > 1
    for item in items:
        assert outcomes[item.key].tokens == cold(item.tokens, max_tokens=item.max_tokens)
    baseline(engine)


def test_r_q17_without_an_interval_nothing_is_kept() -> None:
    faults = WayAt([100])
    engine = build(limits=replace(LIMITS, decode_ckpt_blocks=0), faults=faults)
    outcome = run_one(engine, request(PROMPT, max_tokens=BUDGET))
    assert outcome.tokens == cold(PROMPT, max_tokens=BUDGET)
    assert (engine.stats().decoded.kept, faults.given) == (0, 1)
    assert engine.stats().prefill_tokens > len(PROMPT) - 64


def test_r_q17_a_checkpoint_is_given_up_before_a_capture_fails() -> None:
    engine = build(limits=LIMITS, num_snapshots=4)
    driver = Driver(engine)
    driver.submit(request(PROMPT, "long", max_tokens=BUDGET))
    while not checkpoints(engine):
        driver.step()
    for number in range(3):  # two boundaries a request: more states than the pool has
        driver.submit(request(prompt(140, 20 + number), f"other{number}", max_tokens=2, capture_at=64))
    outcomes = driver.run()
    assert engine.stats().capture_failures == 0
    assert outcomes["long", 0].tokens == cold(PROMPT, max_tokens=BUDGET)
    baseline(engine)


def test_r_q17_rows_that_an_older_stream_needs_are_given_up_and_replayed() -> None:
    limits = EngineLimits(decode_reserve=1, burst_rounds=4, decode_ckpt_blocks=1)
    engine = build(limits=limits, num_blocks=8, num_snapshots=8)
    items = [request(prompt(60 + 30 * n, n), f"r{n}", max_tokens=100, speculation_k=3) for n in range(4)]
    driver = Driver(engine)
    outcomes = driver.run(items)
    assert any(isinstance(event, Parked) and event.preempted for event in driver.events)
    assert engine.stats().decoded.dropped >= engine.stats().decoded.kept > 0
    for chosen in items:
        assert outcomes[chosen.key].tokens == cold(chosen.tokens, max_tokens=100)
    baseline(engine)


def test_r_q17_rows_that_give_way_move_to_the_host_and_come_back_from_there() -> None:
    limits = EngineLimits(decode_reserve=1, burst_rounds=4, decode_ckpt_blocks=1)
    engine = build(limits=limits, num_blocks=8, num_snapshots=16, host_tier_bytes=1 << 26)
    items = [request(prompt(60 + 30 * n, n), f"r{n}", max_tokens=100, speculation_k=3) for n in range(4)]
    driver = Driver(engine)
    outcomes = driver.run(items)
    stats = engine.stats()
    assert stats.decoded.restored > 0
    assert stats.mismatches == 0
    for chosen in items:
        assert outcomes[chosen.key].tokens == cold(chosen.tokens, max_tokens=100)
    baseline(engine)


def test_r_q17_a_waiting_stream_that_is_cancelled_gives_its_checkpoint_back() -> None:
    limits = EngineLimits(decode_reserve=1, burst_rounds=4, decode_ckpt_blocks=1)
    engine = build(limits=limits, num_blocks=8, num_snapshots=8, host_tier_bytes=1 << 26)
    driver = Driver(engine)
    for n in range(3):
        driver.submit(request(prompt(60 + 30 * n, n), f"r{n}", max_tokens=100))
    for _ in range(300):
        waiting = [decoded for decoded in engine._cache.decoded if decoded.role is Role.WAITING]
        if waiting:
            break
        driver.step()
    assert waiting
    for n in range(3):
        engine.cancel(f"r{n}", "done")
    driver.run()
    assert not checkpoints(engine)
    baseline(engine)


def test_r_q7_a_checkpoint_is_restored_by_its_owner_alone() -> None:
    engine = build(limits=LIMITS)
    driver = Driver(engine)
    driver.submit(request(PROMPT, max_tokens=BUDGET))
    while not checkpoints(engine):
        driver.step()
    (kept,) = engine._cache.decoded
    (stream,) = engine._active
    assert kept.owner == stream.session.sequence.session_hash != 0
    other = replace(stream.session.sequence, session_hash=kept.owner + 1)
    with pytest.raises(EngineFault, match="another stream"):
        engine._cache.decoded.restore(kept, other)
    driver.run()
    baseline(engine)
