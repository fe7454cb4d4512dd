"""SpecSession after its rounds: demotion, overshoot, the checkpoint, the graph memo (R-S8, R-S13 to R-S18)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.handoff import flush_pending, hand_off
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.sessions.outcome import Decline, DeclineReason, Emission, Ending
from tests.engine_kit import request
from tests.session_kit import SAMPLED, Bench, ids, sometimes, spec


def emissions(item: GenerateRequest) -> list[Emission]:
    """What the request says alone, decoded plainly."""
    bench = Bench()
    session = bench.prime(replace(item, speculation_k=0))
    bench.rounds([session])
    return session.drain()


def flush(bench: Bench, session: SpecSession) -> None:
    flush_pending([session], bench.model)


@pytest.mark.parametrize(
    "params", [SamplingParams(seed=0, temperature=0.0), SAMPLED], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("rounds", range(8))
def test_r_s17_demoted_after_any_round_goes_on_as_plain_decode(rounds: int, params: SamplingParams) -> None:
    bench = Bench(sometimes)
    item = request(ids(70), max_tokens=30, speculation_k=3, sampling=params, top_logprobs=2)
    expected = emissions(replace(item, speculation_k=0))
    session = spec(bench.prime(item))
    bench.rounds([session], rounds)
    got = session.drain()
    flush(bench, session)
    assert session.demote_ready
    before = bench.model.verifies
    handed = hand_off(session, 70 + len(got))
    assert handed is not None
    assert bench.model.verifies == before, "the hand-off itself costs no pass"
    assert type(handed) is Session
    assert handed.sequence is session.sequence
    assert session.into_demoted() is None, "consumed"
    assert session.demoted
    bench.rounds([handed])
    assert got + handed.drain() == expected
    assert handed.ending == Ending(reason=FinishReason.LENGTH)
    assert handed.telemetry().rounds == bench.model.verifies, "one trunk forward a round, the flush included"
    assert handed.rewind_pos == session.rewind_pos == 64


def test_r_s15_ready_if_and_only_if_nothing_pends_the_next_token_is_known_and_no_row_is_surplus() -> None:
    bench = Bench(sometimes)
    session = spec(bench.open(request(ids(70), speculation_k=3)))
    assert not session.demote_ready, "nothing is decided before the prime"
    session = spec(bench.prime(request(ids(70), "b", speculation_k=3)))
    assert session.demote_ready
    bench.rounds([session], 1)
    assert session.has_pending
    assert not session.demote_ready
    assert session.into_demoted() is None
    assert not session.demoted, "a refusal changes nothing"
    flush(bench, session)
    assert session.demote_ready
    session.tainted = True
    assert not session.demote_ready


def test_r_s4_flush_commits_the_pending_token_and_emits_nothing() -> None:
    bench = Bench(sometimes)
    session = spec(bench.prime(request(ids(70), speculation_k=3)))
    bench.rounds([session], 2)
    said, pending, before = session.drain(), session.pending_tok, bench.model.verifies
    flush(bench, session)
    assert bench.model.verifies == before + 1
    assert session.committed[-1] == pending
    assert session.drain() == []
    flush(bench, session)
    assert bench.model.verifies == before + 1, "nothing pends any more"
    full = Bench().complete(request(ids(70), "plain"))
    assert session.next_pred == full[len(said)]


def test_r_s16_another_count_of_fed_tokens_lets_the_session_finish_in_place() -> None:
    bench = Bench(sometimes)
    session = spec(bench.prime(request(ids(70), max_tokens=30, speculation_k=3)))
    bench.rounds([session], 2)
    said = session.drain()
    flush(bench, session)
    assert hand_off(session, 70 + len(said) - 1) is None
    assert not session.demoted
    bench.rounds([session])
    assert said + session.drain() == emissions(request(ids(70), max_tokens=30))


@pytest.mark.parametrize("surplus", [1, 3, 7])
def test_r_s1_r_s16_overshoot_stays_in_the_rows_and_out_of_the_stream(surplus: int) -> None:
    """Only the fault hook can do it: drafts past the budget are accepted into cache and `committed` alike."""
    full = emissions(request(ids(70), max_tokens=30))
    bench = Bench()
    session = spec(bench.prime(request(ids(70), max_tokens=10, speculation_k=7)))
    session.overshoot = surplus
    bench.rounds([session])
    assert session.committed_len == len(session.committed) == session.sequence.kv_valid_tokens > 70 + 9
    assert bench.model._slots[session.sequence.ssm_slot_idx()] == session.committed
    assert session.committed[70:] == [emission.token for emission in full][: session.committed_len - 70]
    assert session.drain() == full[:10]
    assert session.completion_tokens == 10
    telemetry = session.telemetry()
    assert telemetry.accepted + telemetry.rounds + 1 == 10, "counters come from the trimmed stream"
    assert session.tainted
    assert hand_off(session, 70 + 10) is None


def parked(bench: Bench, name: str = "a", tokens: tuple[int, ...] = ids(200), **fields: object) -> Session:
    session = bench.prime(request(tokens, name, speculation_k=3, **fields))
    for capture in session.drain_captures():
        assert bench.cache.publish(capture.capture_id)
    bench.rounds([session])
    session.park()
    return session


def test_r_s13_rewind_keeps_the_checkpoint_and_nothing_else() -> None:
    bench = Bench(sometimes)
    session = parked(bench)
    assert bench.cache.slots.free == bench.cache.slots.total
    assert bench.cache.blocks.free == bench.cache.blocks.total - 3, (
        "decode-made blocks are free, the tree keeps three"
    )
    said = tuple(emission.token for emission in session.drain())
    assert session.rewind_to_checkpoint((*ids(200), *said, 5, 6), bench.cache) is None
    assert session.committed == list(ids(200)[:192])
    assert session.rewind_pos == 192
    assert session.next_pred is None
    assert not session.has_pending


@pytest.mark.parametrize(
    ("prompt_of", "reason", "position"),
    [
        (lambda t: (*t[:100], 21, *t[101:], 5), DeclineReason.DIVERGED, 100),
        (lambda t: t[:192], DeclineReason.NO_SUFFIX, 192),
        (lambda t: t[:150], DeclineReason.DIVERGED, 150),
        (lambda t: (), DeclineReason.DIVERGED, 0),
    ],
    ids=["another history", "no suffix", "shorter", "empty"],
)
def test_r_s13_exact_tokens_decide(
    prompt_of: Callable[[tuple[int, ...]], tuple[int, ...]], reason: DeclineReason, position: int
) -> None:
    bench = Bench()
    tokens = (*ids(100), 22, *ids(99, 1))
    session = parked(bench, tokens=tokens)
    assert session.rewind_to_checkpoint(prompt_of(tokens), bench.cache) == Decline(
        reason=reason, position=position
    )
    assert session.rewind_to_checkpoint((*tokens, 5), bench.cache) is None, "a refusal changes nothing"


def test_r_s13_a_failed_checkpoint_stores_null() -> None:
    bench = Bench()
    while bench.cache.snapshots.acquire() is not None:
        pass
    session = bench.prime(request(ids(200), speculation_k=3))
    assert session.rewind_pos is None
    bench.rounds([session])
    session.park()
    declined = session.rewind_to_checkpoint((*ids(200), 5), bench.cache)
    assert declined == Decline(reason=DeclineReason.NO_CHECKPOINT, position=0)
    assert session.committed == []


def test_r_s13_a_warm_prime_has_the_checkpoint_that_it_found() -> None:
    bench = Bench()
    parked(bench)
    assert bench.prime(request(ids(200), "again")).rewind_pos == 192


def test_r_s14_resident_as_long_as_the_tree_holds_the_state() -> None:
    bench = Bench()
    session = bench.prime(request(ids(200)))
    (capture,) = session.drain_captures()
    assert session.rewind_pos == 192
    assert not session.rewind_is_resident(bench.cache), "the broker has not answered"
    assert bench.cache.publish(capture.capture_id)
    assert session.rewind_is_resident(bench.cache)
    session.park()
    bench.cache.evict([capture.entry.key])
    assert not session.rewind_is_resident(bench.cache)
    declined = session.rewind_to_checkpoint((*ids(200), 5), bench.cache)
    assert declined == Decline(reason=DeclineReason.NOT_RESIDENT, position=192)


def test_r_s8_a_replaying_session_is_eager_for_good() -> None:
    bench = Bench()
    item = request(ids(70))
    session = Session(item, bench.open(item).sequence, bench.shape, capture_disabled=True)
    session.pending_tok = 3
    session.reset_graph_fallback_on_resume()
    assert session.verify_rows(()).eager


def test_r_s18_a_failed_graph_capture_is_forgotten_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    session = bench.prime(request(ids(70)))
    bench.rounds([session], 1)
    session.graphs.mark()
    assert session.verify_rows(()).eager
    with caplog.at_level("INFO"):
        session.reset_graph_fallback_on_resume()
        assert not session.verify_rows(()).eager
        assert len(caplog.records) == 1
        session.reset_graph_fallback_on_resume()
        assert len(caplog.records) == 1, "nothing was set: nothing is said"


def test_r_s8_a_round_that_could_not_be_captured_makes_its_sessions_eager() -> None:
    bench = Bench()
    session, other = bench.prime(request(ids(70))), bench.prime(request(ids(70, seed=1), "other"))
    bench.model.uncaptured = True
    bench.rounds([session], 1)
    bench.model.uncaptured = False
    assert session.verify_rows(()).eager
    bench.rounds([other], 1)
    assert not other.verify_rows(()).eager, "who was not in the launch still tries"
