"""The eviction policy is a pure function of its candidates."""

from __future__ import annotations

from services.gpu_worker.engine.cache.evict import Candidate, choose, worst_first


def item(name: str, *, used: int, replay: int = 64, blocks: int = 1, snapshots: int = 1) -> Candidate:
    return Candidate(
        key=name.encode(), used_at=used, replay_tokens=replay, blocks=blocks, snapshots=snapshots
    )


def test_the_least_recent_goes_first() -> None:
    order = worst_first([item("new", used=9), item("old", used=1), item("mid", used=5)], now=10)
    assert [candidate.key for candidate in order] == [b"old", b"mid", b"new"]


def test_among_equally_recent_the_shortest_replay_goes_first() -> None:
    order = worst_first([item("long", used=3, replay=4096), item("short", used=3, replay=64)], now=10)
    assert [candidate.key for candidate in order] == [b"short", b"long"]


def test_ties_go_by_key_so_that_workers_agree() -> None:
    assert [c.key for c in worst_first([item("b", used=3), item("a", used=3)], now=3)] == [b"a", b"b"]


def test_choose_stops_when_there_is_enough() -> None:
    found = [item("a", used=1, blocks=2), item("b", used=2, blocks=2), item("c", used=3, blocks=2)]
    assert choose(found, blocks=3, snapshots=0, now=9) == [b"a", b"b"]
    assert choose(found, blocks=0, snapshots=1, now=9) == [b"a"]
    assert choose(found, blocks=99, snapshots=0, now=9) == [b"a", b"b", b"c"]
    assert choose([], blocks=1, snapshots=1, now=9) == []


def test_choose_leaves_what_frees_nothing_wanted() -> None:
    found = [item("inner", used=1, blocks=0), item("leaf", used=2, blocks=1)]
    assert choose(found, blocks=1, snapshots=0, now=9) == [b"leaf"]
