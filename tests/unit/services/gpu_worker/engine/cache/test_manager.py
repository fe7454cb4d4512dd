"""Hits, captures and eviction by hand, with every reference recounted after each step."""

from __future__ import annotations

import pytest

from services.gpu_worker.engine.cache.captures import CaptureFailed
from services.gpu_worker.engine.cache.entry import Capture
from services.gpu_worker.engine.requests import GenerateRequest, Hit
from services.gpu_worker.engine.sessions.base import Session
from tests.engine_kit import ROOT, request
from tests.session_kit import Bench, ids


def captures_of(bench: Bench, item: GenerateRequest) -> list[Capture]:
    """Prime, give the sequence back, answer what was captured."""
    session = bench.prime(item)
    captures = session.drain_captures()
    bench.cache.check([session.sequence])
    session.sequence.guard.release()
    bench.cache.check([])
    return captures


def publish(bench: Bench, item: GenerateRequest) -> list[bytes]:
    captures = captures_of(bench, item)
    for capture in captures:
        assert bench.cache.publish(capture.capture_id)
    bench.cache.check([])
    return [capture.entry.key for capture in captures]


def look(bench: Bench, item: GenerateRequest) -> Hit | None:
    return bench.cache.lookup(item.request_id, item.root, item.tokens, item.chain)


def warm(bench: Bench, item: GenerateRequest) -> Session:
    assert look(bench, item) is not None
    session = bench.prime(item)
    bench.cache.check([session.sequence])
    return session


def test_r_q6_a_hit_may_be_the_whole_prompt_and_no_more() -> None:
    bench = Bench()
    publish(bench, request(ids(128), "a"))
    same = look(bench, request(ids(128), "same"))
    assert same is not None
    assert same.position == 128
    assert look(bench, request(ids(127), "shorter")) is None
    hit = look(bench, request((*ids(128), 5), "longer"))
    assert hit is not None
    assert hit.position == 128


def test_lookup_takes_references_once_a_request() -> None:
    bench = Bench()
    publish(bench, request(ids(130), "a"))
    item = request(ids(140), "b")
    assert look(bench, item) == look(bench, item)
    bench.cache.check([])
    assert bench.cache.drop_hit("b") is not None
    assert bench.cache.drop_hit("b") is None
    bench.cache.check([])


def test_a_pending_capture_is_no_hit_and_a_discarded_one_leaves_nothing() -> None:
    bench = Bench()
    (capture,) = captures_of(bench, request(ids(130), "a"))
    assert look(bench, request(ids(200), "b")) is None
    bench.cache.discard(capture.capture_id)
    bench.cache.discard(capture.capture_id)
    bench.cache.check([])
    assert bench.cache.blocks.free == bench.cache.blocks.total
    assert bench.cache.snapshots.free == bench.cache.snapshots.total
    assert not bench.cache.publish(capture.capture_id)


def test_another_root_or_other_tokens_under_a_key_are_no_hit() -> None:
    bench = Bench()
    publish(bench, request(ids(130), "a"))
    item = request(ids(140), "b")
    assert bench.cache.lookup("c", b"\x01" * 32, item.tokens, item.chain) is None
    assert bench.cache.lookup("d", ROOT, ids(140, 8), item.chain) is None
    bench.cache.check([])


def test_fr_2_fr_3_a_capture_must_stand_at_the_newest_row() -> None:
    bench = Bench()
    item = request(ids(300), use_cache=False)
    session = bench.prime(item)
    with pytest.raises(CaptureFailed, match="no boundary of this sequence"):
        bench.cache.capture(item, session.sequence, 128, session.last_hidden)
    assert bench.cache.capture_failures == 1
    bench.cache.check([session.sequence])


def test_the_second_publisher_of_a_key_takes_no_snapshot() -> None:
    bench = Bench()
    assert len(captures_of(bench, request(ids(130), "a"))) == 1
    assert captures_of(bench, request(ids(130), "b")) == []


def test_a_branch_splits_the_entry_that_owned_its_rows() -> None:
    bench = Bench()
    (long,) = captures_of(bench, request(ids(320), "a"))
    assert (long.kv_blocks, long.splits) == (5, None)
    bench.cache.publish(long.capture_id)
    branch, tail = captures_of(bench, request(ids(128) + ids(100, 3), "b"))
    assert (branch.kv_blocks, branch.splits, branch.entry.parent) == (2, long.entry, None)
    assert (tail.kv_blocks, tail.splits, tail.entry.parent) == (1, None, branch.entry)
    assert long.entry.parent is branch.entry
    assert long.entry.blocks == 3
    assert bench.cache.publish(branch.capture_id)
    assert bench.cache.publish(tail.capture_id)
    bench.cache.check([])


def test_discarding_a_branch_takes_what_builds_on_it_and_heals_the_split() -> None:
    bench = Bench()
    (long,) = captures_of(bench, request(ids(320), "a"))
    bench.cache.publish(long.capture_id)
    branch, tail = captures_of(bench, request(ids(128) + ids(100, 3), "b"))
    bench.cache.discard(branch.capture_id)
    assert not bench.cache.publish(tail.capture_id)
    assert long.entry.blocks == 5
    assert long.entry.parent is None
    bench.cache.check([])
    hit = look(bench, request(ids(400), "c"))
    assert hit is not None
    assert hit.position == 320


def test_publishing_before_what_it_builds_on_is_refused() -> None:
    bench = Bench()
    first, second = captures_of(bench, request(ids(320), "a", capture_at=128))
    assert not bench.cache.publish(second.capture_id)
    assert bench.cache.publish(first.capture_id)
    bench.cache.check([])


def test_a_fork_where_no_entry_is_costs_the_capture_alone() -> None:
    """Two cold prompts with a shared start run side by side; the second's fork was not known at its prime."""
    bench = Bench()
    one, two = request(ids(320), "a"), request(ids(128) + ids(150, 4), "b")
    slow = bench.open(two)
    rows = slow.next_chunk(192, bench.cache)
    slow.prefilled(rows, bench.model.prefill(rows), bench.cache)
    for capture in bench.prime(one).drain_captures():
        assert bench.cache.publish(capture.capture_id)
    while not slow.primed:
        rows = slow.next_chunk(64, bench.cache)
        slow.prefilled(rows, bench.model.prefill(rows), bench.cache)
    assert slow.telemetry().capture_failures == 1
    assert slow.drain_captures() == []


def test_evicting_a_leaf_frees_its_rows_and_its_state() -> None:
    bench = Bench()
    (key,) = publish(bench, request(ids(320), "a"))
    assert bench.cache.candidates(1, 0) == [key]
    evicted = bench.cache.evict([key])
    assert (evicted.gone, evicted.blocks, evicted.snapshots) == ((key,), 5, 1)
    assert bench.cache.blocks.free == bench.cache.blocks.total
    bench.cache.check([])


def test_evicting_a_parent_drops_its_state_and_keeps_rows_while_a_child_lives() -> None:
    bench = Bench()
    low, high = publish(bench, request(ids(320), "a", capture_at=128))
    evicted = bench.cache.evict([low])
    assert (evicted.stateless, evicted.gone, evicted.blocks, evicted.snapshots) == ((low,), (), 0, 1)
    bench.cache.check([])
    hit = look(bench, request(ids(330), "b"))
    assert hit is not None
    assert hit.key == high
    bench.cache.drop_hit("b")
    evicted = bench.cache.evict([high])
    assert set(evicted.gone) == {low, high}
    assert evicted.blocks == 5
    bench.cache.check([])


def test_a_state_comes_back_to_an_entry_that_lost_it() -> None:
    bench = Bench()
    low, _ = publish(bench, request(ids(320), "a", capture_at=128))
    bench.cache.evict([low])
    (again,) = captures_of(bench, request(ids(128) + ids(20, 6), "b"))
    assert (again.entry.key, again.kv_blocks, again.fresh) == (low, 0, False)
    assert bench.cache.publish(again.capture_id)
    bench.cache.check([])
    hit = look(bench, request(ids(128) + ids(20, 7), "c"))
    assert hit is not None
    assert hit.position == 128


def test_what_a_hit_holds_is_not_evicted() -> None:
    bench = Bench()
    (key,) = publish(bench, request(ids(130), "a"))
    item = request(ids(140), "b")
    look(bench, item)
    assert bench.cache.candidates(1, 1) == []
    assert bench.cache.evict([key]).gone == ()
    session = bench.prime(item)
    assert bench.cache.candidates(0, 1) == [key], "the state was restored; only the rows are shared now"
    assert bench.cache.evict([key]).gone == (key,)
    bench.cache.check([session.sequence])
    session.sequence.guard.release()
    assert bench.cache.blocks.free == bench.cache.blocks.total


def test_what_a_pending_capture_builds_on_is_not_evicted() -> None:
    bench = Bench()
    (key,) = publish(bench, request(ids(130), "a"))
    session = warm(bench, request(ids(300), "b"))
    assert bench.cache.candidates(1, 1) == []
    for capture in session.drain_captures():
        bench.cache.publish(capture.capture_id)
    assert key not in bench.cache.candidates(1, 0), "an entry stands on its rows"
    assert bench.cache.candidates(0, 2)


def test_r_q13_free_count_is_the_initial_one_after_warm_turns_and_full_eviction() -> None:
    bench = Bench()
    tokens = ids(100)
    for turn in range(6):
        item = request(tokens, f"turn{turn}", max_tokens=20)
        look(bench, item)
        session = bench.prime(item)
        for capture in session.drain_captures():
            bench.cache.publish(capture.capture_id)
        bench.rounds([session])
        tokens = (*tokens, *(e.token for e in session.drain()), *ids(50, turn))
        session.sequence.guard.release()
        bench.cache.check([])
    for _ in range(10):
        bench.cache.evict(bench.cache.candidates(999, 999))
    assert bench.cache.blocks.free == bench.cache.blocks.total
    assert bench.cache.snapshots.free == bench.cache.snapshots.total
    assert len(bench.cache.tree) == 0


def test_warm_streams_equal_cold_ones() -> None:
    bench = Bench()
    publish(bench, request(ids(130), "a"))
    item = request(ids(130) + ids(60, 2), "b", max_tokens=25, speculation_k=3)
    session = warm(bench, item)
    assert session.sequence.cached_prefix_tokens == 128
    bench.rounds([session])
    cold = Bench().complete(item)
    assert [e.token for e in session.drain()] == cold
