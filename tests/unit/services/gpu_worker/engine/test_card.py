"""The card's side of the engine, on triton's interpreter: fixed-address inputs, the lazy fold, rounds that run whole."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import dispatch
from services.gpu_worker.engine.batch import DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.card_logits import DecidedRow
from services.gpu_worker.engine.config import FULL, LINEAR, EngineConfig
from services.gpu_worker.engine.device_rounds import DeviceRounds
from services.gpu_worker.engine.flights import By, Round, WholeRow
from services.gpu_worker.engine.inputs import RoundInputs
from services.gpu_worker.engine.layers.steps import Span
from services.gpu_worker.engine.models.hybrid import HybridModel
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.models.random import TINY, drawn_model
from services.gpu_worker.engine.placement import CPU, Placement
from services.gpu_worker.engine.requests import SamplingParams
from services.gpu_worker.engine.runner import ModelRunner
from services.gpu_worker.engine.sampling import TokenPicker
from shared.errors import EngineFault

DIMS = replace(TINY, vocab=2, layer_types=(LINEAR, FULL))
"""Two ids, so that a head of random weights guesses right now and then."""
PROMPT = [(number * 7919 + 13) % DIMS.vocab for number in range(20)]
TABLE = (3, 1, 0, 2)
MOST = 3


def _card(fold_rows: int) -> Placement:
    return Placement(
        device=torch.device("cpu"), dtype=torch.float32, on_card=True, fold_rows=fold_rows, recipe="card"
    )


@cache
def _model(placement: Placement) -> LoadedModel:
    return drawn_model(DIMS, placement)


class Primed(NamedTuple):
    hidden: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    window: Tensor


@cache
def _primed_on_card() -> Primed:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "_take", lambda self, primed: None)
        patch.setattr(sys.modules[__name__], "_primed_on_card", lambda: None)
        bench = Bench(_card(2), patch)
        hidden = bench.prime()
    states = bench.states
    return Primed(hidden, bench.kv.k, bench.kv.v, states.state[:, 1], states.windows[:, 1, : states.taps])


class Bench:
    """One sequence on a slot of its own, its prompt primed."""

    def __init__(self, placement: Placement, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        patch.setattr(dispatch, "INTERPRETED", placement.on_card)
        config = EngineConfig(
            num_blocks=8, num_slots=2, num_snapshots=1, max_verify=MOST, max_batch=2, max_context=256
        )
        self.model = _model(placement).model
        self.kv = KVPool(DIMS, config.num_blocks, placement)
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        self.states = StatePool(DIMS, 2, 1, MOST, placement)
        self.runner = ModelRunner(self.model, self.kv, self.states, config)
        self.states.reset(1)
        if placement.on_card:
            self._take(_primed_on_card())
        else:
            self.primed = self.prime()
        self.length = len(PROMPT)

    def prime(self) -> Tensor:
        nothing = torch.zeros(DIMS.hidden)
        chunk = PrefillChunk(slot=1, start=0, tokens=PROMPT, block_table=TABLE, previous_hidden=nothing)
        return self.runner.prefill([chunk])[0]

    def _take(self, primed: Primed) -> None:
        """What another bench primed: the interpreter takes seconds for a prompt."""
        self.primed = primed.hidden
        self.kv.k.copy_(primed.k)
        self.kv.v.copy_(primed.v)
        self.states.state[:, 1] = primed.state
        self.states.windows[:, 1, : self.states.taps] = primed.window
        self.states.advanced(1, len(PROMPT))

    def verify(self, ids: list[int], accept: int) -> Tensor:
        rows = VerifyRows(slot=1, start=self.length, tokens=ids, block_table=TABLE)
        (hidden,) = self.runner.verify([rows])
        self.runner.accept(1, accept)
        self.length += accept
        return hidden[:accept]

    def decode(self, rounds: list[tuple[int, int]]) -> Tensor:
        """(columns, accepted) a round, over ids that do not depend on the cuts; hidden of the accepted rows."""
        out = []
        for columns, accepted in rounds:
            out.append(self.verify([(self.length + i) * 5 % DIMS.vocab for i in range(columns)], accepted))
        return torch.cat(out)

    def drafted(self, row: DraftRows) -> Tensor:
        self.patch.setattr(dispatch, "INTERPRETED", self.states.placement.on_card)
        return self.runner.draft([row])[0]

    def settled(self) -> tuple[Tensor, Tensor]:
        self.runner.flush(1)
        return self.states.state[:, 1].clone(), self.states.windows[:, 1, : self.states.taps].clone()


def test_a_card_computes_what_the_twin_defines_whenever_it_stores_its_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C1.1 on a card: columns, rejected drafts and the rows between two stores of a state change no bit."""
    cuts = [(1, 1), (3, 2), (2, 2)]
    twin = Bench(CPU, monkeypatch)
    expected, states = twin.decode(cuts), twin.settled()
    lazy = Bench(_card(3), monkeypatch)
    got, kept = lazy.decode(cuts), lazy.settled()
    assert (got - expected).norm() < 1e-5 * expected.norm()
    assert (lazy.primed - twin.primed).norm() < 1e-5 * twin.primed.norm()
    for one, other in zip(kept, states, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()

    row = DraftRows(start=0, tokens=PROMPT[:12], hiddens=twin.primed[:12], block_table=TABLE)
    drafted, long = (one.drafted(row) for one in (twin, lazy))
    assert (long - drafted).norm() < 1e-5 * drafted.norm(), "more rows than one call of the head holds"

    eager = Bench(_card(1), monkeypatch)
    assert torch.equal(eager.decode([(1, 1)] * 5), got)
    for one, other in zip(eager.settled(), kept, strict=True):
        assert torch.equal(one, other)


def test_rounds_that_run_whole_give_the_stream_of_plain_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Bench(CPU, monkeypatch)
    token = int(twin.runner.logits(twin.primed[-1:]).argmax())
    plain = [token]
    for _ in range(5):
        plain.append(int(twin.runner.logits(twin.verify([plain[-1]], 1)).argmax()))

    bench = Bench(_card(2), monkeypatch)
    assert isinstance(bench.model, HybridModel)
    inputs = RoundInputs(2, MOST, len(TABLE), torch.device("cpu"), bench.states.scratch)
    rounds = DeviceRounds(bench.model, bench.kv, bench.states, inputs, truncate=False)
    rounds.clear()
    left = len(plain) - 1
    span, ids = Span(bench.length, MOST, TABLE), [[token, *(0,) * (MOST - 1)]]
    inputs.fill([span], ids, (2, MOST), [1], bench.states)
    rounds.state.wide[0], rounds.told.by[0] = MOST, By.HEAD
    rounds.state.left[0], rounds.state.tail_tokens[0, 0], rounds.state.tail_counts[0] = left, token, 1
    rounds.state.tail_hidden[0, 0] = bench.primed[-1]
    stream, committed = [token], []
    while len(stream) < len(plain):
        told = rounds.launch(Round(2, MOST, head=MOST - 1)).tolist()
        assert told[1][-1] == 0, "padding committed a row"
        committed.append(told[0][-1])
        stream += told[0][: committed[-1]]
    assert stream == plain
    assert sum(committed) == left, "a row lies past the budget"
    assert max(committed) > 1, "no draft was ever accepted: the test shows nothing"

    bench.states.store[:, 1] = torch.nan
    states = bench.states
    # Slot and blocks may be another stream's by now: rounds fly on from one burst into the next.
    memory = (states.state[:, 1], states.store[:, 1], states.windows[:, 1], bench.kv.k, bench.kv.v)
    kept = [part.clone() for part in memory]
    rounds.inputs.pending[0] += 2
    rounds.inputs.store_after[0] = 0
    for _ in range(2):
        assert rounds.launch(Round(2, MOST, head=MOST - 1))[0, -1] == 0
    for part, before in zip(memory, kept, strict=True):
        assert torch.equal(part.nan_to_num(), before.nan_to_num()), (
            "a round wrote for a stream that had ended"
        )


def test_a_whole_round_is_the_verify_and_the_picks_that_the_host_would_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sampled, with drafts that somebody else brought: rows, hiddens and tokens are those of the host's own path."""
    rules = SamplingParams(seed=7, temperature=0.8)
    bench = Bench(_card(2), monkeypatch)
    drafts = [1, 0]
    row = WholeRow(
        slot=1, start=bench.length, anchor=1, block_table=TABLE, rules=rules, choice=0, given=drafts
    )
    (result,) = bench.runner.whole([row])
    bench.runner.accept(1, 1)

    other = Bench(_card(2), monkeypatch)
    hidden = other.verify([1, *drafts], MOST)
    picker = TokenPicker(rules, vocab=DIMS.vocab, prompt=PROMPT)
    rows = other.runner.logits(hidden).numpy()
    assert result.drafts == drafts
    assert torch.equal(result.hidden, hidden)
    assert result.picks == [picker.pick(row, other.length - MOST + i + 1) for i, row in enumerate(rows)]
    with pytest.raises(EngineFault, match="gone"):
        np.asarray(DecidedRow(3))
