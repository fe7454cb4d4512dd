"""Places in a slab never overlap, are never lost, and are handed out again by size."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.cache.host_memory import Places, PlainMemory

SIZES = (1, 256, 300, 4096, (16 << 20) + 1)
TOTAL = 64 << 20


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(SIZES)), max_size=40))
def test_no_two_places_overlap_and_none_is_lost(steps: list[tuple[bool, int]]) -> None:
    places, held, most = Places(TOTAL), [], {size: 0 for size in SIZES}
    for take, size in steps:
        if take or not held:
            start = places.take(size)
            if start is None:
                assert size > 16 << 20, "small copies fill less than this"
                continue
            assert start % 256 == 0
            assert start + size <= TOTAL
            assert all(start + size <= other or other + room <= start for other, room in held)
            held.append((start, size))
            most[size] = max(most[size], sum(1 for _, room in held if room == size))
        else:
            places.give(*held.pop())
    for start, size in held:
        places.give(start, size)
    for size, count in most.items():
        assert all(places.take(size) is not None for _ in range(count)), "a place that was given back is gone"


def test_plain_memory_keeps_a_copy_of_its_own() -> None:
    values = torch.arange(4.0)
    kept = PlainMemory().keep(values.clone())
    values.zero_()
    assert kept is not None
    assert kept.tolist() == [0.0, 1.0, 2.0, 3.0]
