"""The affinity pool: who is nominated, what exact tokens decide, what is counted, what is kept from eviction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.stats import AffinityCounts
from tests.engine_kit import ROOT, WARM, Driver, baseline, build, cold, prompt, request, run_one


def counts(engine: Engine) -> AffinityCounts:
    return engine.stats().affinity


def turn(engine: Engine, tokens: tuple[int, ...], name: str, *labels: str, **fields: object) -> list[int]:
    """One turn through the worker's calls; its completion."""
    item = request(tokens, name, labels=labels, **({"max_tokens": 20, "sampling": WARM} | fields))
    return run_one(engine, item).tokens


def test_the_next_turn_goes_on_from_the_checkpoint_and_says_what_a_cold_run_says() -> None:
    engine = build()
    tokens = prompt(200, 1)
    said = turn(engine, tokens, "one", "session-7")
    assert counts(engine).parked == 1
    longer = (*tokens, *said, *prompt(40, 2))
    outcome = turn(engine, longer, "two", "session-7")
    assert outcome == cold(longer, max_tokens=20, sampling=WARM)
    assert counts(engine).served == 1
    assert counts(engine).parked == 1, "the later turn takes the place of the earlier one"
    baseline(engine)


def test_c1_3_decode_made_blocks_are_free_and_the_pending_token_is_dropped() -> None:
    engine = build()
    turn(engine, prompt(200, 1), "one", max_tokens=100, speculation_k=3)
    stats = engine.stats()
    assert (stats.blocks.cached, stats.blocks.owned) == (3, 0), "rows below 192 alone"
    assert stats.snapshots.cached == 1
    (session,) = engine._affinity._parked
    assert session.committed == list(prompt(200, 1)[:192])
    assert not session.has_pending
    engine.check()


def test_r_s13_a_label_nominates_and_exact_tokens_decide() -> None:
    engine = build()
    tokens = prompt(200, 1)
    turn(engine, tokens, "one", "user-1")
    other = (*tokens[:100], *prompt(150, 9))
    assert turn(engine, other, "two", "user-1") == cold(other, max_tokens=20, sampling=WARM)
    seen = counts(engine)
    assert seen.declined == (("diverged", 1),)
    assert dict(seen.left_at)[64] == 1, "100 tokens agreed"
    assert seen.served == 0


def test_the_narrowest_label_goes_first_and_among_its_sessions_the_closest() -> None:
    """Two conversations of one user run side by side: each turn is nominated its own predecessor."""
    engine = build()
    turn(engine, prompt(200, 1), "a1", "session-a", "user")
    turn(engine, prompt(200, 2), "b1", "session-b", "user")
    assert counts(engine).declined == (("diverged", 1),), "the user's other conversation"
    turn(engine, (*prompt(200, 1), *prompt(30, 3)), "a2", "session-a", "user")
    turn(engine, (*prompt(200, 2), *prompt(30, 3)), "b2", "user")
    assert counts(engine).served == 2
    assert counts(engine).declined == (("diverged", 1),)


def test_without_a_label_the_chain_nominates() -> None:
    engine = build()
    turn(engine, prompt(200, 1), "one")
    turn(engine, prompt(200, 2), "two")
    turn(engine, (*prompt(200, 1), *prompt(30, 3)), "three")
    assert counts(engine).served == 1
    turn(engine, prompt(200, 4), "unrelated")
    assert counts(engine).declined == (), "nobody was expected"


def test_a_prompt_that_ends_at_the_checkpoint_leaves_nothing_to_prime() -> None:
    engine = build()
    turn(engine, prompt(200, 1), "one")
    assert turn(engine, prompt(200, 1)[:192], "two") == cold(
        prompt(200, 1)[:192], max_tokens=20, sampling=WARM
    )
    assert counts(engine).declined == (("no_suffix", 1),)


def test_c4_a_label_means_nothing_in_another_namespace() -> None:
    engine = build()
    tokens = prompt(200, 1)
    turn(engine, tokens, "one", "session-7")
    turn(engine, (*tokens, 5, 6), "two", "session-7", root=b"q" * 32)
    assert counts(engine).served == 0
    assert counts(engine).declined == ()


def test_an_evicted_checkpoint_is_a_miss_and_leaves_the_pool() -> None:
    engine = build()
    tokens = prompt(200, 1)
    turn(engine, tokens, "one")
    engine.evict(engine.eviction_candidates(99, 99))
    turn(engine, (*tokens, 5), "two")
    assert counts(engine).declined == (("not_resident", 1),)
    engine.check()


def test_a_refused_capture_parks_nothing_that_serves() -> None:
    engine = build()
    driver = Driver(engine, grant=lambda _: False)
    driver.run([request(prompt(200, 1), "one")])
    turn(engine, (*prompt(200, 1), 5), "two")
    assert counts(engine).served == 0
    engine.check()


def test_checkpoints_of_parked_sessions_are_evicted_last() -> None:
    engine = build(limits=EngineLimits(max_parked=1))
    turn(engine, prompt(130, 1), "old")
    turn(engine, prompt(130, 2), "new")
    (session,) = engine._affinity._parked
    order = engine.eviction_candidates(99, 99)
    assert len(order) == 2
    assert order[-1] == session.rewind_key
    assert engine.eviction_candidates(1, 1) != [session.rewind_key]


def test_the_pool_is_bounded_and_may_be_off() -> None:
    engine = build(limits=EngineLimits(max_parked=2))
    for seed in range(4):
        turn(engine, prompt(130, seed), f"r{seed}")
        engine.check()
    assert counts(engine).parked == 2
    off = build(limits=EngineLimits(max_parked=0))
    turn(off, prompt(130, 1), "r")
    assert counts(off).parked == 0


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 3), st.booleans(), st.booleans()),
        min_size=1,
        max_size=10,
    ),
    most=st.integers(0, 3),
)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_conversations_do_the_books_balance_and_tokens_are_cold_ones(
    turns: list[tuple[int, int, int, bool, bool]], most: int
) -> None:
    """Three conversations in two namespaces grow, are rewritten, meet eviction and refused captures."""
    engine = build(limits=EngineLimits(max_parked=most), num_blocks=24, num_snapshots=4)
    texts: dict[tuple[int, int], tuple[int, ...]] = {}
    for number, (which, namespace, blocks, rewrite, evict) in enumerate(turns):
        before = texts.get((which, namespace), prompt(70, which))
        kept = before[: len(before) // 2] if rewrite else before
        tokens = (*kept, *prompt(30 * blocks, number))[:400]
        root = bytes([namespace + 1]) * 32
        item: GenerateRequest = request(tokens, f"t{number}", root=root, labels=(f"c{which}",), max_tokens=6)
        driver = Driver(engine, grant=lambda _, odd=number % 4: odd != 3)
        said = driver.run([item])[item.key].tokens
        assert said == run_one(build(), replace(item, use_cache=False)).tokens
        texts[which, namespace] = (*tokens, *said)[:380]
        if evict:
            engine.evict(engine.eviction_candidates(4, 1))
        baseline(engine)
        assert counts(engine).parked <= most


def test_a_second_lookup_of_a_request_answers_the_same() -> None:
    engine = build()
    tokens = prompt(200, 1)
    turn(engine, tokens, "one")
    item = request((*tokens, 5, 6), "two")
    first = engine.lookup("two", ROOT, item.tokens, item.chain)
    assert first is not None
    assert engine.lookup("two", ROOT, item.tokens, item.chain) == first
    assert counts(engine).served == 1, "counted once"
    engine.drop_hit("two")
    engine.check()


@pytest.mark.parametrize("after", [1, 3])
def test_a_cancelled_turn_is_parked_too(after: int) -> None:
    """A stop string is a cancellation here, and the next turn comes all the same."""
    engine = build(limits=EngineLimits(burst_rounds=1))
    driver = Driver(engine)
    driver.submit(request(prompt(200, 1), "one", max_tokens=50))
    for _ in range(1 + after):
        driver.step()
    engine.cancel("one", "stop_string")
    driver.run()
    assert counts(engine).parked == 1
    turn(engine, (*prompt(200, 1), 5), "two")
    assert counts(engine).served == 1
    baseline(engine)
