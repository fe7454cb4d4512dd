"""The policy of FR-91: own entries, least recently used first, nothing that is needed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.cache_broker.eviction import Held, plan

START = datetime(2026, 1, 1, tzinfo=UTC)


def held(name: str, *, parent: str | None = None, age: int = 0, **changes: Any) -> Held:
    fields: dict[str, Any] = {
        "key": name.encode(),
        "parent": parent.encode() if parent else None,
        "state_bytes": 60,
        "kv_bytes": 40,
        "state": "live",
        "leased": False,
        "last_used": START - timedelta(seconds=age),
    }
    return Held(**{**fields, **changes})


def chosen(*entries: Held, need: int, protect: str | None = None, limit: int = 64) -> list[str] | None:
    keys = plan(entries, need=need, protect={protect.encode()} if protect else set(), limit=limit)
    return None if keys is None else [key.decode() for key in keys]


def test_fr_91_the_least_recently_used_go_first_and_no_more_than_needed() -> None:
    entries = [held("a", age=1), held("b", age=3), held("c", age=2)]
    assert chosen(*entries, need=1) == ["b"]
    assert chosen(*entries, need=101) == ["b", "c"]


def test_what_is_leased_reserved_or_protected_stays() -> None:
    entries = [
        held("leased", leased=True, age=9),
        held("reserved", state="reserved", age=9),
        held("parent", age=9),
        held("free", age=1),
    ]
    assert chosen(*entries, need=100, protect="parent") == ["free"]
    assert chosen(*entries, need=101, protect="parent") is None


def test_a_parent_frees_its_state_alone_while_a_child_stays() -> None:
    entries = [held("p", age=5), held("c", parent="p", leased=True)]
    assert chosen(*entries, need=60) == ["p"]
    assert chosen(*entries, need=61) is None


def test_rows_without_a_state_go_with_the_last_child() -> None:
    entries = [
        held("g", state="rows", state_bytes=0),
        held("p", parent="g", age=5),
        held("c", parent="p", age=1),
    ]
    assert chosen(*entries, need=180) == ["p", "c"]
    assert chosen(*entries, need=241) is None
    assert chosen(*entries, need=240) == ["p", "c"]


def test_a_branch_point_goes_only_when_one_child_is_left() -> None:
    entries = [
        held("branch", age=9),
        held("left", parent="branch", age=5),
        held("right", parent="branch", leased=True),
    ]
    assert chosen(*entries, need=100) == ["left"]
    assert chosen(*entries, need=101) == ["left", "branch"]
    assert chosen(*entries, need=161) is None


def test_rows_of_the_new_entrys_parent_stay() -> None:
    """A stateless parent without other children is the next entry's ground."""
    entries = [held("p", state="rows", state_bytes=0), held("c", parent="p")]
    assert chosen(*entries, need=101, protect="p") is None


def test_withdrawn_ones_are_asked_for_first() -> None:
    """A lost `Freed` is mended by asking again."""
    assert chosen(held("old", age=9), held("gone", state="evicting"), need=1) == ["gone"]


def test_a_bounded_number_at_once() -> None:
    entries = [held(f"e{number}", age=9 - number) for number in range(9)]
    assert chosen(*entries, need=900, limit=4) == ["e0", "e1", "e2", "e3"]


@settings(deadline=None, max_examples=200)
@given(
    shape=st.lists(
        st.tuples(
            st.integers(-1, 7),
            st.integers(0, 9),
            st.booleans(),
            st.sampled_from(["live", "rows", "reserved"]),
        ),
        max_size=8,
    ),
    need=st.integers(1, 900),
)
def test_a_plan_frees_what_it_promises(shape: list[tuple[int, int, bool, str]], need: int) -> None:
    """Carried out on a model of the books: states of the chosen, then rows that no kept entry stands on."""
    entries = [
        held(
            f"e{index}",
            parent=f"e{parent % index}" if index and parent >= 0 else None,
            age=age,
            leased=leased and state == "live",
            state=state,
            state_bytes=0 if state == "rows" else 60,
        )
        for index, (parent, age, leased, state) in enumerate(shape)
    ]
    keys = plan(entries, need=need, protect=set(), limit=64)
    going = set(keys or ())
    kept = {entry.key: entry for entry in entries}
    freed = sum(entry.state_bytes for entry in entries if entry.key in going)
    while True:
        standing = {entry.parent for entry in kept.values()}
        loose = [
            entry for entry in kept.values()
            if entry.key not in standing and (entry.key in going or (entry.state == "rows" and going))
        ]  # fmt: skip
        if not loose:
            break
        for entry in loose:
            freed += entry.kv_bytes
            del kept[entry.key]
    if keys is not None:
        assert freed >= need
        assert all(entry.state == "live" and not entry.leased for entry in entries if entry.key in going)
