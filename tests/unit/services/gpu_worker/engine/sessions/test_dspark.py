"""DsparkSpecSession by hand, over the stand-in: what it commits, emits, holds back and answers once."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine.batch import BlockAsk
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.sessions.dspark import DsparkSpecSession
from services.gpu_worker.engine.sessions.handoff import hand_off
from services.gpu_worker.engine.sessions.rounds import run_round
from shared.errors import EngineFault
from tests.engine_kit import GREEDY, request
from tests.session_kit import SAMPLED, Bench, ids, sometimes


class Oracle:
    """Proposes what the stand-in will pick, but where `wrong`; as many as asked."""

    def __init__(
        self, bench: Bench, item: GenerateRequest, session: DsparkSpecSession, ask: BlockAsk
    ) -> None:
        self.count = 7
        self._bench, self._ask = bench, ask
        self._prefix = (*session.committed, ask.anchor)

    def row(self, k: int, before: int) -> np.ndarray:
        if k:
            self._prefix = (*self._prefix, before)
        number = self._bench.model._number(self._prefix)
        return self._bench.model.row(-number if sometimes(self._prefix) else number)

    def stands(self, k: int, before: int) -> bool:
        return True


class Context:
    """A drafter's context rows that cover whatever they are asked for, unless told otherwise."""

    def __init__(self) -> None:
        self.dims = SimpleNamespace(tail_rows=45, block=5)
        self.ring = SimpleNamespace(k=torch.zeros(2), v=torch.ones(2))
        self.covered = True

    def covers(self, slot: int, position: int) -> bool:
        return self.covered


def opened(bench: Bench, item: GenerateRequest) -> DsparkSpecSession:
    sequence = SequenceState.host_only()
    bench.cache.bring_back(item.request_id)
    admission = bench.cache.admit(item, sequence)
    assert admission is not None
    return DsparkSpecSession(
        item,
        sequence,
        bench.shape,
        context=Context(),
        last_hidden=admission.last_hidden,  # type: ignore[arg-type]
    )


def primed(bench: Bench, item: GenerateRequest) -> DsparkSpecSession:
    session = opened(bench, item)
    while not session.primed:
        rows = session.next_chunk(128, bench.cache)
        session.prefilled(rows, bench.model.prefill(rows), bench.cache)
        hidden = session.last_hidden[None]
    session.end_prime(bench.model.logits(hidden).numpy()[0])

    def propose(asks: Sequence[BlockAsk]) -> list[Oracle]:
        return [Oracle(bench, item, session, ask) for ask in asks]

    bench.model.propose = propose  # type: ignore[attr-defined]
    return session


def item_of(length: int = 70, **fields: Any) -> GenerateRequest:
    return request(ids(length), max_tokens=20, drafter="block", speculation_k=7, **fields)


def plain(item: GenerateRequest) -> list[int]:
    return Bench().complete(request(item.tokens, max_tokens=item.max_tokens, sampling=item.sampling))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_r_d1_a_round_commits_and_emits_the_same_rows(params: Any) -> None:
    bench, item = Bench(), item_of(sampling=params)
    session = primed(bench, item)
    said: list[int] = []
    while not session.finished:
        rounds, rows = session.rounds, session.pos
        run_round([session], bench.model)  # type: ignore[arg-type]
        fresh = [emission.token for emission in session.drain()]
        said += fresh
        if session.rounds > rounds:
            assert session.committed[rows:] == fresh
            assert session.rounds == rounds + 1
        assert not session.has_pending
    assert said == plain(item)
    assert session.telemetry().accepted > 0


def test_r_d2_without_its_rows_there_is_no_session() -> None:
    bench, item = Bench(), item_of()
    context = Context()
    context.covered = False
    sequence = SequenceState.host_only()
    bench.cache.admit(item, sequence)
    with pytest.raises(EngineFault, match="45 rows"):
        DsparkSpecSession(item, sequence, bench.shape, context=context)  # type: ignore[arg-type]
    assert sequence.seq_len == 0


def test_r_d2_the_tail_is_the_window_and_a_block() -> None:
    bench = Bench()
    session = opened(bench, item_of())
    assert session.draft_tail_rows == 45
    assert session.draft_kv[1].sum() == 2
    assert session.cache is session.sequence


def test_r_d4_a_finished_session_says_nothing_more() -> None:
    bench = Bench()
    session = primed(bench, item_of())
    for _ in range(40):
        run_round([session], bench.model)  # type: ignore[arg-type]
    assert session.finished
    assert len(session.drain()) == 20
    assert not run_round([session], bench.model)  # type: ignore[arg-type]
    assert session.drain() == []


def test_r_d5_the_prefix_capture_is_answered_once() -> None:
    bench = Bench()
    session = primed(bench, item_of(200))
    captures = session.take_prefix_capture()
    assert captures is not None
    assert [capture.entry.position for capture in captures] == [192]
    assert session.take_prefix_capture() is None
    assert not captures[0].entry.published, "the worker publishes"


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 8), st.integers(0, 5), st.booleans())
def test_r_d6_it_can_be_handed_over_at_every_boundary(rounds: int, seed: int, sampled: bool) -> None:
    bench = Bench()
    item = request(
        ids(70, seed),
        max_tokens=20,
        sampling=SAMPLED if sampled else GREEDY,
        drafter="block",
        speculation_k=7,
    )
    session = primed(bench, item)
    for _ in range(rounds):
        run_round([session], bench.model)  # type: ignore[arg-type]
    said = [emission.token for emission in session.drain()]
    if session.finished:
        return
    assert session.pos == len(item.tokens) + len(said)
    other = hand_off(session, session.pos + 1)
    assert other is None, "the counts do not agree: it goes on by itself (R-S16)"
    going = hand_off(session, session.pos)
    assert going is not None
    bench.rounds([going])
    said += [emission.token for emission in going.drain()]
    assert said == plain(item)
    assert session.into_demoted() is None, "it was handed over"
