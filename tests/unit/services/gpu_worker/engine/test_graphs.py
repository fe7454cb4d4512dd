"""Sizes of captured launches, and what happens when one cannot be captured. (Captures themselves need a card.)"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.engine import graphs
from services.gpu_worker.engine.graphs import GraphCache, Size, bucket, buckets


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_bucket_holds_what_is_wanted_and_there_are_few(wanted: int, most: int) -> None:
    size = bucket(min(wanted, most), most)
    assert min(wanted, most) <= size <= most
    assert size in buckets(most)
    assert len(buckets(most)) <= most.bit_length() + 1


def _launch(size: Size) -> torch.Tensor:
    return torch.full(size, 7.0)


def test_without_graphs_every_run_is_a_launch() -> None:
    cache = GraphCache(_launch, lambda: None, enabled=False)
    assert not cache.prepare((2, 1))
    assert torch.equal(cache.run((2, 1)), _launch((2, 1)))
    assert cache.sizes == []


def test_r_s8_a_capture_that_fails_is_told_and_the_launch_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = iter([(0, 1), (0, 2)])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools), raising=False)
    cache = GraphCache(_launch, lambda: None, enabled=True)
    reports: list[str] = []

    def broken(size: Size) -> graphs._Kept:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cache, "_capture", broken)
    cache.prepare_all([(4, 2)], reports.append)
    assert reports == ["graph 4 x 2: not to be had"]
    assert cache._pool == (0, 2), "a pool that a failed capture may hold is used no more"
    assert torch.equal(cache.run((4, 2)), _launch((4, 2)))
