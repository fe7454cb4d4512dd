"""SpecSession, row by row of the requirements, on a stand-in model whose rows depend on the whole prefix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.models.random import TINY
from services.gpu_worker.engine.requests import SamplingParams
from tests.engine_kit import ROOT, request
from tests.session_kit import SAMPLED, VOCAB, Bench, ids, sometimes, spec


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("params", [SamplingParams(seed=0, temperature=0.0), SAMPLED])
def test_r_s1_rows_equal_committed_after_every_burst(k: int, params: SamplingParams) -> None:
    bench = Bench(sometimes)
    session = bench.prime(request(ids(70), max_tokens=40, speculation_k=k, sampling=params))
    while session.ending is None:
        bench.rounds([session], 1)
        assert session.committed_len == len(session.committed) == session.sequence.kv_valid_tokens
        assert session.committed_len <= 70 + 40 - 1, "no row lies past the public stream"
        if session.ending is None:
            assert bench.model._slots[session.sequence.ssm_slot_idx()] == session.committed
    assert bench.complete(request(ids(70), "plain", max_tokens=40, sampling=params)) == [
        emission.token for emission in session.drain()
    ]


def test_r_s2_next_pred_is_emitted_first_and_never_with_a_pending_token() -> None:
    bench = Bench()
    session = bench.open(request(ids(70), speculation_k=3))
    assert session.next_pred is None
    session = bench.prime(request(ids(70), "other", speculation_k=3))
    first = session.next_pred
    assert first is not None
    assert not session.has_pending
    bench.rounds([session], 1)
    assert session.drain()[0].token == first
    assert session.next_pred is None
    assert session.has_pending


@pytest.mark.parametrize("params", [SamplingParams(seed=0, temperature=0.0), SAMPLED])
def test_r_s3_counters_are_positions_and_splits_do_not_matter(params: SamplingParams) -> None:
    item = request(ids(70), max_tokens=30, speculation_k=3, sampling=params)
    whole = Bench(sometimes).complete(item)
    bench = Bench(sometimes)
    session = bench.prime(item)
    got: list[int] = []
    while session.ending is None:
        assert session.sctr == session.uctr == 70 + len(got) + (session.next_pred is not None)
        bench.rounds([session], 1)
        got += [emission.token for emission in session.drain()]
    assert got == whole


def test_r_s4_pending_is_emitted_once_and_rides_as_column_0() -> None:
    bench = Bench(sometimes)
    session = bench.prime(request(ids(70), max_tokens=30, speculation_k=3))
    emitted: list[int] = []
    rounds = 0
    while session.ending is None:
        bench.rounds([session], 1)
        rounds += 1
        emitted += [emission.token for emission in session.drain()]
        if session.ending is None:
            assert session.pending_tok == emitted[-1]
            assert session.committed == [*ids(70), *emitted[:-1]]
            assert session.next_pred is None
            assert bench.model._prefixes[int(session.last_hidden[0])] == tuple(session.committed)
    assert bench.model.verifies == rounds == session.telemetry().rounds, "no solo pass at a burst joint"


def test_r_s5_capture_at_is_one_shot_and_on_the_grid() -> None:
    bench = Bench()
    session = bench.open(request(ids(300), capture_at=150, speculation_k=3))
    assert session.capture_at == 128
    session.capture_at = 191
    assert session.capture_at == 128
    primed = bench.prime(request(ids(300), "b", capture_at=150, speculation_k=3))
    assert primed.capture_at is None
    assert [capture.entry.position for capture in primed.drain_captures()] == [128, 256]


def test_r_s5_capture_at_beyond_the_prompt_is_cleared_without_a_capture() -> None:
    primed = Bench().prime(request(ids(100), capture_at=512, speculation_k=3))
    assert primed.capture_at is None
    assert [capture.entry.position for capture in primed.drain_captures()] == [64]


def test_r_s6_one_capture_serves_both_classes_at_one_position() -> None:
    primed = Bench().prime(request(ids(300), capture_at=200, ckpt_at=192, speculation_k=3))
    assert [capture.entry.position for capture in primed.drain_captures()] == [192]
    assert primed.drain_captures() == [], "drained once"


def test_r_s6_miss_lcp_is_cut_for_the_shared_prefix() -> None:
    bench = Bench()
    first = bench.prime(request(ids(300), "a"))
    for capture in first.drain_captures():
        assert bench.cache.publish(capture.capture_id)
    second = bench.prime(request(ids(150) + ids(150, 5), "b"))
    captures = second.drain_captures()
    assert [capture.entry.position for capture in captures] == [128, 256]
    assert captures[0].splits is not None
    third = request(ids(140) + ids(90, 9), "c")
    for capture in captures:
        assert bench.cache.publish(capture.capture_id)
    hit = bench.cache.lookup("c", ROOT, third.tokens, third.chain)
    assert hit is not None
    assert hit.position == 128


def test_r_s6_a_failed_capture_is_counted_and_fails_nothing() -> None:
    bench = Bench()
    while bench.cache.snapshots.acquire() is not None:
        pass
    session = bench.prime(request(ids(300), speculation_k=2, max_tokens=5))
    assert session.drain_captures() == []
    assert session.telemetry().capture_failures == 1
    bench.rounds([session])
    assert session.ending is not None
    assert session.ending.reason is FinishReason.LENGTH


def test_r_s7_checkpoint_lies_before_the_generation_header() -> None:
    session = Bench().prime(request(ids(300), ckpt_at=250))
    assert [capture.entry.position for capture in session.drain_captures()] == [192]
    assert session.ckpt_at is None


def test_r_s7_null_means_prompt_end() -> None:
    session = Bench().prime(request(ids(320)))
    assert [capture.entry.position for capture in session.drain_captures()] == [320]


def test_r_s8_capture_disabled_primes_without_captures() -> None:
    bench = Bench()
    item = request(ids(300), speculation_k=3)
    session = bench.open(item)
    session.capture_disabled = True
    rows = session.next_chunk(512, bench.cache)
    assert len(rows.tokens) == 300, "no cut either"


def test_r_s9_near_the_context_k_shrinks_to_0_and_the_stream_ends_at_the_same_position() -> None:
    bench = Bench(max_ctx=110)
    speculative = bench.prime(request(ids(70), max_tokens=40, speculation_k=3))
    plain = bench.prime(request(ids(70), "plain", max_tokens=40))
    bench.rounds([plain])
    while speculative.ending is None:
        bench.rounds([speculative], 1)
        if speculative.committed_len + 3 + 3 >= 110 and speculative.ending is None:
            spec(speculative).draft_job()
            assert spec(speculative).demoted
    assert speculative.ending == plain.ending
    assert [e.token for e in speculative.drain()] == [e.token for e in plain.drain()]
    assert speculative.committed_len < 110


def test_r_s10_rows_below_a_capture_stay_while_the_session_lives() -> None:
    bench = Bench()
    session = bench.prime(request(ids(200), speculation_k=3, max_tokens=60))
    (capture,) = session.drain_captures()
    below = list(session.sequence.block_table[:3])
    bench.rounds([session])
    assert session.sequence.block_table[:3] == below
    assert all(bench.cache.blocks.refs(block) == 2 for block in below)
    assert bench.cache.publish(capture.capture_id)
    session.sequence.guard.release()
    assert all(bench.cache.blocks.refs(block) == 1 for block in below)


def test_r_s11_the_draft_plane_is_the_last_one_and_goes_with_the_drafter() -> None:
    bench = Bench()
    session = spec(bench.prime(request(ids(70), speculation_k=3)))
    kv = KVPool(TINY, 2)
    plane = session.draft_plane_ref(kv)
    assert plane is not None
    keys, values, row_bytes = plane
    assert keys.data_ptr() == kv.k[TINY.draft_plane].data_ptr()
    assert values.data_ptr() == kv.v[TINY.draft_plane].data_ptr()
    assert row_bytes * TINY.planes == kv.row_bytes
    assert session.cache_ref is session.sequence
    session.drafter = None
    assert session.draft_plane_ref(kv) is None


def test_r_s12_telemetry_is_monotone_and_counts_positions() -> None:
    bench = Bench(sometimes)
    session = bench.prime(request(ids(70), max_tokens=50, speculation_k=3))
    last = session.telemetry()
    while session.ending is None:
        bench.rounds([session], 1)
        now = session.telemetry()
        assert now.rounds == last.rounds + 1
        assert (now.drafted, now.accepted) >= (last.drafted, last.accepted)
        assert now.drafted == sum(now.drafted_at)
        assert now.accepted == sum(now.accepted_at) <= now.drafted
        last = now
    assert 0 < last.accepted < last.drafted
    assert last.tau == last.accepted / last.rounds
    assert last.accepted + last.rounds + 1 == 50, "every round brings its accepted drafts and one more"


def test_a_perfect_head_is_always_accepted() -> None:
    """The pairing of draft rows is right: the head that sees the true hidden of the row before never errs."""
    bench = Bench()
    session = bench.prime(request(ids(70), max_tokens=49, speculation_k=3, sampling=SAMPLED))
    bench.rounds([session])
    telemetry = session.telemetry()
    assert telemetry.accepted == telemetry.drafted == 36
    assert telemetry.rounds == 12


def test_fr_22_a_useless_head_costs_few_drafts_and_no_token() -> None:
    bench = Bench(lambda _: True)
    bench.shape = replace(bench.shape, draft_cost=0.35)
    item = request(ids(70), max_tokens=400, speculation_k=3, sampling=SAMPLED)
    session = bench.prime(item)
    bench.rounds([session])
    assert session.telemetry().drafted < 0.25 * session.telemetry().rounds
    assert [e.token for e in session.drain()] == Bench().complete(replace(item, speculation_k=0))


@pytest.mark.parametrize("offset", range(6))
def test_fr_24_the_earliest_event_in_token_order_wins(offset: int) -> None:
    """A stop within the budget ends as stop though the same burst holds the cap; one beyond the cap is length."""
    full = Bench().complete(request(ids(70), max_tokens=20))
    stop = full[10]
    first = full.index(stop)
    bench = Bench()
    budget = first - 1 + offset
    session = bench.prime(request(ids(70), max_tokens=budget, speculation_k=7, stop_ids=frozenset({stop})))
    bench.rounds([session])
    assert session.ending is not None
    got = [emission.token for emission in session.drain()]
    if budget > first:
        assert session.ending.reason is FinishReason.STOP
        assert session.ending.stop_id == stop
        assert got == full[:first]
        assert session.completion_tokens == first + 1
    else:
        assert session.ending.reason is FinishReason.LENGTH
        assert got == full[:budget]


@pytest.mark.parametrize("budget", range(1, 20))
def test_fr_26_delivered_equals_budget(budget: int) -> None:
    session = (bench := Bench()).prime(request(ids(70), max_tokens=budget, speculation_k=5))
    bench.rounds([session])
    assert len(session.drain()) == budget == session.completion_tokens


def test_nan_logits_fail_their_request_alone() -> None:
    bench = Bench()
    full = bench.complete(request(ids(70), max_tokens=10))
    good = bench.prime(request(ids(70, 3), "good", max_tokens=10, speculation_k=2))
    bad = bench.prime(request(ids(70), "bad", max_tokens=10, speculation_k=2))
    bench.model.poisoned.add((*ids(70), *full[:4]))
    bench.rounds([good, bad])
    assert bad.ending is not None
    assert bad.ending.error_code == "engine_fault"
    assert good.ending is not None
    assert good.ending.reason is FinishReason.LENGTH
    assert len(good.drain()) == 10


@pytest.mark.parametrize("known", [0, 1, 5, 19, 20])
@pytest.mark.parametrize("k", [0, 3])
def test_replay_verifies_what_was_emitted_and_says_the_rest(known: int, k: int) -> None:
    full = Bench().complete(request(ids(70), max_tokens=20, sampling=SAMPLED))
    bench = Bench(sometimes)
    item = request(ids(70), max_tokens=20, sampling=SAMPLED, emitted=tuple(full[:known]), speculation_k=k)
    assert bench.complete(item) == full[known:]


def test_replay_of_another_stream_ends_with_an_error() -> None:
    full = Bench().complete(request(ids(70), max_tokens=20))
    other = [*full[:6], (full[6] + 1) % VOCAB]
    session = (bench := Bench()).prime(request(ids(70), max_tokens=20, emitted=tuple(other)))
    bench.rounds([session])
    assert session.ending is not None
    assert session.ending.error_code == "replay_diverged"
    assert session.drain() == []
