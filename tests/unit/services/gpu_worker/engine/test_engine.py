"""The engine as a whole on a tiny random model: events, exactness, cancels, pools, memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from services.gpu_worker.engine.events import (
    Admitted,
    Burst,
    Captured,
    Finished,
    FinishReason,
    HitDropped,
    Primed,
)
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import SamplingParams
from shared.errors import ContextLengthExceeded, EngineFault, InvalidRequest, Overloaded
from tests.engine_kit import (
    GREEDY,
    ROOT,
    WARM,
    Driver,
    baseline,
    build,
    cold,
    prompt,
    request,
    run_one,
    tiny_model,
)


def test_the_events_of_a_request_in_order() -> None:
    engine = build()
    driver = Driver(engine)
    driver.run([request(prompt(200), max_tokens=30, speculation_k=3)])
    kinds = [type(event) for event in driver.events]
    assert kinds[:2] == [Admitted, Captured]
    assert kinds[2] is Primed
    assert kinds[-1] is Finished
    assert set(kinds[3:-1]) == {Burst}
    bursts = [event for event in driver.events if isinstance(event, Burst)]
    for before, after in pairwise(bursts):
        assert after.offset == before.offset + len(before.tokens)
    (finished,) = [event for event in driver.events if isinstance(event, Finished)]
    assert finished.telemetry.rounds == sum(burst.rounds for burst in bursts)
    assert finished.telemetry.drafted == sum(burst.drafted for burst in bursts)
    assert finished.completion_tokens == 30
    assert engine.step() == []
    assert not engine.has_work()
    baseline(engine)


def test_first_tokens_leave_in_the_step_that_ends_the_prime() -> None:
    engine = build()
    engine.submit(request(prompt(100)))
    assert any(isinstance(event, Burst) for event in engine.step())


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_c1_speculation_equals_plain(k: int, params: SamplingParams) -> None:
    tokens = prompt(150, 1)
    assert run_one(build(), request(tokens, max_tokens=40, sampling=params, speculation_k=k)).tokens == cold(
        tokens, max_tokens=40, sampling=params
    )


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.8, "frequency_penalty": 0.3},
        {"logit_bias": ((7, 4.0), (9, -3.0))},
        {"min_p": 0.05},
        {"top_k": 20, "top_p": 0.8},
        {"min_tokens": 10},
    ],
    ids=["repetition", "presence", "bias", "min_p", "top", "min_tokens"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_fr_38_penalties_do_not_tell_speculation_apart(change: dict[str, object], temperature: float) -> None:
    params = replace(SamplingParams(seed=5, temperature=temperature), **change)
    tokens = prompt(90, 2)
    plain = run_one(build(), request(tokens, max_tokens=30, sampling=params, stop_ids=frozenset({11})))
    spec = run_one(
        build(), request(tokens, max_tokens=30, sampling=params, stop_ids=frozenset({11}), speculation_k=3)
    )
    assert spec.tokens == plain.tokens
    assert spec.end.reason == plain.end.reason


@pytest.mark.parametrize("k", [0, 3])
def test_fr_38_penalties_see_every_completion_token(k: int) -> None:
    """A presence penalty no logit outweighs forbids repeats, within a burst too."""
    params = SamplingParams(seed=5, temperature=1.0, top_k=3, presence_penalty=1000.0)
    tokens = run_one(build(), request(prompt(90, 2), max_tokens=60, sampling=params, speculation_k=k)).tokens
    assert len(set(tokens)) == len(tokens) == 60


def test_fr_33_logprobs_are_the_same_with_speculation() -> None:
    tokens = prompt(90, 3)
    plain = run_one(build(), request(tokens, max_tokens=30, sampling=WARM, top_logprobs=3))
    spec = run_one(build(), request(tokens, max_tokens=30, sampling=WARM, top_logprobs=3, speculation_k=3))
    assert spec.logprobs == plain.logprobs
    assert [item.token for item in spec.logprobs] == spec.tokens
    assert all(item.logprob < 0.0 and len(item.top) == 3 for item in spec.logprobs)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [0, 3])
def test_c1_warm_equals_cold_in_tokens_rows_and_states(k: int, params: SamplingParams) -> None:
    """The second request restores the first one's checkpoint; rows, states and tokens are those of a cold run."""
    shared, tail = prompt(200, 4), prompt(70, 5)
    warm_engine, cold_engine = build(), build()
    run_one(warm_engine, request(shared, "first"))
    fields = {"max_tokens": 24, "sampling": params, "speculation_k": k}
    digests = []
    for engine in (warm_engine, cold_engine):
        driver = Driver(engine)
        driver.submit(request(shared + tail, "second", **fields))
        while not engine._active or not engine._active[0].session.primed:
            driver.step()
        sequence = engine._active[0].session.sequence
        driver.run()
        outcome = driver.outcomes["second", 0]
        digests.append((outcome.tokens, outcome.cached_tokens, sequence))
    assert digests[0][1] == 192
    assert digests[1][1] == 0
    assert digests[0][0] == digests[1][0]
    baseline(warm_engine)


def test_c1_warm_rows_and_state_bytes_equal_cold_ones() -> None:
    shared, tail = prompt(200, 4), prompt(70, 5)
    warm_engine, cold_engine = build(), build()
    run_one(warm_engine, request(shared, "first"))
    seen = []
    for engine in (warm_engine, cold_engine):
        driver = Driver(engine)
        item = request(shared + tail, "second", max_tokens=30, speculation_k=2)
        driver.submit(item)
        while not any(isinstance(event, Burst) for event in driver.step()):
            pass
        driver.step()
        session = engine._active[0].session
        slot = session.sequence.ssm_slot_idx()
        engine.runner.flush(slot)
        rows = engine.kv.read_rows(session.sequence.block_table, 0, session.committed_len)
        seen.append(
            (rows[:, :-1], rows[:, -1:, :, :270], engine.states.digest(slot), list(session.committed))
        )
    assert seen[0][3] == seen[1][3]
    assert seen[0][0].equal(seen[1][0])
    assert seen[0][1].equal(seen[1][1]), "the draft plane of the prompt"
    assert seen[0][2] == seen[1][2]


def test_fr_13_the_first_repeat_hits() -> None:
    engine = build()
    tokens = prompt(300, 6)
    cached = [run_one(engine, request(tokens, f"r{turn}")).cached_tokens for turn in range(4)]
    assert cached == [0, 256, 256, 256]


def test_fr_10_fr_11_speculation_hits_as_far_as_plain() -> None:
    tokens = prompt(300, 6)
    for k in (0, 3):
        engine = build()
        run_one(engine, request(tokens, "a", speculation_k=k))
        assert run_one(engine, request(tokens, "b", speculation_k=k)).cached_tokens == 256


def test_fr_15_identical_prompts_at_once_answer_as_cold() -> None:
    tokens = prompt(300, 7)
    outcomes = Driver(engine := build()).run([request(tokens, name) for name in "abc"])
    assert all(outcome.tokens == cold(tokens) for outcome in outcomes.values())
    assert all(outcome.cached_tokens == 0 for outcome in outcomes.values())
    baseline(engine)


def test_c4_another_root_never_hits() -> None:
    engine = build()
    tokens = prompt(300, 6)
    run_one(engine, request(tokens, "a"))
    outcome = run_one(engine, request(tokens, "b", root=b"\x09" * 32))
    assert outcome.cached_tokens == 0


def test_a_request_without_a_hold_runs_cold() -> None:
    engine = build()
    tokens = prompt(300, 6)
    first = run_one(engine, request(tokens, "a"))
    assert engine.lookup("b", ROOT, tokens, request(tokens).chain) is not None
    engine.drop_hit("b")
    engine.submit(request(tokens, "b"))
    events = engine.step()
    admitted = next(event for event in events if isinstance(event, Admitted))
    assert (admitted.cached_tokens, admitted.hit_key) == (0, None)
    assert first.tokens


def test_choices_share_one_hold_and_differ_by_choice() -> None:
    engine = build()
    tokens = prompt(300, 6)
    run_one(engine, request(tokens, "a"))
    items = [
        request(tokens, "n", choice=choice, sampling=replace(WARM, seed=100 + choice)) for choice in range(3)
    ]
    outcomes = Driver(engine).run(items)
    assert [outcome.cached_tokens for outcome in outcomes.values()][-3:] == [256] * 3
    streams = [outcomes["n", choice].tokens for choice in range(3)]
    assert streams[0] != streams[1]
    assert streams == [cold(tokens, choice=item.choice, sampling=item.sampling) for item in items]
    baseline(engine)


def test_refused_captures_leave_nothing() -> None:
    engine = build()
    driver = Driver(engine, grant=lambda _: False)
    driver.run([request(prompt(300), "a", capture_at=128)])
    assert len(driver.outcomes["a", 0].captured) == 2
    assert engine.stats().blocks.free == engine.stats().blocks.total
    assert engine.stats().snapshots.free == engine.stats().snapshots.total
    assert engine.stats().entries == 0


def test_captured_says_what_the_broker_must_charge() -> None:
    engine = build()
    outcome = run_one(engine, request(prompt(300), "a", capture_at=128))
    low, high = outcome.captured
    assert (low.parent_key, low.position, low.kv_bytes) == (None, 128, 2 * engine.kv.block_bytes)
    assert (high.parent_key, high.position, high.kv_bytes) == (low.key, 256, 2 * engine.kv.block_bytes)
    assert low.state_bytes == engine.state_bytes > engine.states.snapshot_bytes


@pytest.mark.parametrize("after", range(6))
def test_c6_cancel_at_any_step_returns_everything(after: int) -> None:
    engine = build(prefill_chunk=64, limits=EngineLimits(burst_rounds=1))
    driver = Driver(engine)
    items = [request(prompt(150, 1), "a", max_tokens=50, speculation_k=3), request(prompt(100, 2), "b")]
    for item in items:
        driver.submit(item)
    for _ in range(after):
        driver.step()
    engine.cancel("a", "client left")
    engine.cancel("nobody", "unknown ids are ignored")
    driver.step()
    end = driver.outcomes["a", 0].end
    assert (end.reason, end.detail) == (FinishReason.CANCELLED, "client left")
    assert end.completion_tokens == len(driver.outcomes["a", 0].tokens)
    driver.run()
    assert driver.outcomes["b", 0].tokens == cold(prompt(100, 2))
    baseline(engine)


def test_cancel_in_mid_burst_takes_effect_within_one_round() -> None:
    engine = build(limits=EngineLimits(burst_rounds=1000))
    driver = Driver(engine)
    driver.submit(request(prompt(100), "a", max_tokens=800))
    driver.step()
    verify, calls = engine.runner.verify, []

    def counted(rows: object) -> object:
        calls.append(rows)
        if len(calls) == 3:
            engine.cancel("a", "stop string")
        return verify(rows)

    engine.runner.verify = counted
    driver.step()
    assert len(calls) == 3
    assert driver.outcomes["a", 0].end.reason is FinishReason.CANCELLED


def test_interrupt_ends_a_burst_and_changes_no_token() -> None:
    engine = build(limits=EngineLimits(burst_rounds=1000))
    verify, calls = engine.runner.verify, []

    def counted(rows: object) -> object:
        calls.append(rows)
        engine.interrupt()
        return verify(rows)

    engine.runner.verify = counted
    outcome = run_one(engine, request(prompt(100), max_tokens=20))
    assert len(outcome.bursts) == len(calls) == 19
    assert outcome.tokens == cold(prompt(100), max_tokens=20)


def test_a_burst_that_goes_on_costs_no_pass_of_its_own() -> None:
    engine = build(limits=EngineLimits(burst_rounds=1))
    verify, calls = engine.runner.verify, []

    def counted(rows: object) -> object:
        calls.append(rows)
        return verify(rows)

    engine.runner.verify = counted
    outcome = run_one(engine, request(prompt(100), max_tokens=30, speculation_k=3))
    assert len(calls) == outcome.end.telemetry.rounds


def test_eos_counts_and_is_not_emitted() -> None:
    tokens = prompt(100, 8)
    full = cold(tokens, max_tokens=20)
    stop = full[7]
    outcome = run_one(build(), request(tokens, max_tokens=20, stop_ids=frozenset({stop}), speculation_k=3))
    first = full.index(stop)
    assert outcome.tokens == full[:first]
    assert outcome.end.reason is FinishReason.STOP
    assert outcome.end.stop_id == stop
    assert outcome.end.completion_tokens == first + 1


def test_an_earlier_attempts_tokens_are_verified_and_not_emitted_again() -> None:
    tokens = prompt(100, 8)
    full = cold(tokens, max_tokens=20, sampling=WARM)
    for known in (1, 9, 20):
        outcome = run_one(
            build(),
            request(tokens, max_tokens=20, sampling=WARM, emitted=tuple(full[:known]), speculation_k=3),
        )
        assert outcome.tokens == full[known:]
        assert all(burst.offset >= known for burst in outcome.bursts)
        assert outcome.end.completion_tokens == 20


def test_a_diverging_replay_says_so() -> None:
    outcome = run_one(build(), request(prompt(100, 8), emitted=(3, 3, 3)))
    assert outcome.end.reason is FinishReason.ERROR
    assert outcome.end.error_code == "replay_diverged"


def test_fr_16_more_than_the_pool_is_refused_at_submit() -> None:
    engine = build(num_blocks=4)
    with pytest.raises(ContextLengthExceeded) as caught:
        engine.submit(request(prompt(250), max_tokens=10))
    assert caught.value.window == 256
    assert run_one(engine, request(prompt(246), max_tokens=10)).end.reason is FinishReason.LENGTH


def test_a_full_queue_and_a_name_in_use_are_refused() -> None:
    engine = build(limits=EngineLimits(max_waiting=1))
    engine.submit(request(prompt(10), "a"))
    with pytest.raises(InvalidRequest):
        engine.submit(request(prompt(10), "a"))
    with pytest.raises(Overloaded):
        engine.submit(request(prompt(10), "b"))
    engine.cancel("a", "gone")
    (finished,) = engine.step()
    assert isinstance(finished, Finished)
    engine.submit(request(prompt(10), "b"))


def test_work_waits_for_room_and_gets_it_by_eviction() -> None:
    """Eight prompts of four blocks through a pool of nine: entries give way, nobody starves, tokens are cold ones."""
    engine = build(num_blocks=9)
    items = [request(prompt(200, seed), f"r{seed}", max_tokens=20) for seed in range(8)]
    outcomes = Driver(engine).run(items)
    for item in items:
        assert outcomes[item.key].tokens == cold(item.tokens, max_tokens=20)
    baseline(engine)


def test_holds_give_way_when_nothing_else_can_run() -> None:
    engine = build(num_blocks=8)
    driver = Driver(engine)
    for seed in (1, 2):
        driver.run([request(prompt(130, seed), f"fill{seed}", max_tokens=2)])
    for seed in (1, 2):
        tokens = prompt(130, seed) + prompt(300, 9)
        assert engine.lookup(f"r{seed}", ROOT, tokens, request(tokens).chain) is not None
        engine.submit(request(tokens, f"r{seed}", max_tokens=10))
        driver.outcomes[f"r{seed}", 0] = type(driver.outcomes["fill1", 0])()
    driver.run()
    dropped = [event.request_id for event in driver.events if isinstance(event, HitDropped)]
    assert dropped
    assert driver.outcomes["r1", 0].end.reason is FinishReason.LENGTH
    assert driver.outcomes["r2", 0].end.reason is FinishReason.LENGTH
    baseline(engine)


def test_snapshots_run_out_and_come_back_by_eviction() -> None:
    engine = build(num_snapshots=3)
    driver = Driver(engine)
    for seed in range(6):
        driver.run([request(prompt(130, seed), f"r{seed}", max_tokens=2)])
    assert engine.stats().capture_failures == 0
    assert engine.stats().snapshots.free >= 2
    baseline(engine)


def test_without_an_mtp_head_speculation_is_plain() -> None:
    engine = build(model=tiny_model(with_mtp=False))
    outcome = run_one(engine, request(prompt(100), max_tokens=10, speculation_k=3))
    assert len(outcome.tokens) == 10
    assert outcome.end.telemetry.drafted == 0


def test_a_broken_launch_ends_its_streams_and_not_the_engine() -> None:
    engine = build()
    verify = engine.runner.verify

    def breaks(_: object) -> object:
        raise EngineFault("a broken launch")

    engine.runner.verify = breaks
    outcome = run_one(engine, request(prompt(100), "a"))
    assert (outcome.end.reason, outcome.end.error_code) == (FinishReason.ERROR, "engine_fault")
    engine.runner.verify = verify
    assert run_one(engine, request(prompt(100), "b")).tokens == cold(prompt(100))
    baseline(engine)


def test_fr_39_accepted_lengths_are_reproducible() -> None:
    item = request(prompt(90, 3), max_tokens=40, sampling=WARM, speculation_k=3)
    runs = [run_one(build(), item).end.telemetry for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0].accepted > 0


def test_fr_2_staggered_ends_do_not_mix_streams() -> None:
    """Rows leave the batch every few steps; every stream and every cache entry stays its own."""
    engine = build(num_snapshots=16)
    items = [
        request(
            prompt(80 + 9 * n, n),
            f"r{n}",
            max_tokens=5 * (n + 1),
            sampling=replace(WARM, seed=n),
            speculation_k=n % 4,
        )
        for n in range(12)
    ]
    outcomes = Driver(engine).run(items)
    for item in items:
        assert outcomes[item.key].tokens == cold(
            item.tokens, max_tokens=item.max_tokens, sampling=item.sampling
        )
    for item in items:
        again = run_one(engine, replace(item, request_id=item.request_id + "again"))
        assert again.tokens == outcomes[item.key].tokens
        assert again.cached_tokens > 0
    baseline(engine)
