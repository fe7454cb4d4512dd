"""Asking for a block and walking what it proposes: the target's rules and history, left to right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.gpu_worker.engine.batch import BlockAsk
from services.gpu_worker.engine.drafters.base import DraftJob
from services.gpu_worker.engine.drafters.block import BlockDrafter, draft_blocks
from services.gpu_worker.engine.models.block_heads import BlockHeads, MarkovRows
from services.gpu_worker.engine.requests import SamplingParams
from services.gpu_worker.engine.sampling import TokenPicker
from tests.block_kit import drafter_of
from tests.engine_kit import tiny_model

VOCAB = 8
GREEDY = SamplingParams(seed=0, temperature=0.0)


class Scripted:
    """Row k prefers (token before + step) mod 8; the drafter believes in its first `sure` drafts."""

    def __init__(self, count: int, *, step: int = 1, sure: int = 99, broken: int | None = None) -> None:
        self.count = count
        self.step, self.sure, self.broken = step, sure, broken

    def row(self, k: int, before: int) -> np.ndarray:
        row = np.zeros(VOCAB, dtype=np.float32)
        row[(before + self.step) % VOCAB] = 5.0
        return np.full(VOCAB, np.nan, dtype=np.float32) if k == self.broken else row

    def stands(self, k: int, before: int) -> bool:
        return k < self.sure


class Runner:
    def __init__(self, *proposals: Scripted) -> None:
        self.proposals = list(proposals)
        self.asked: list[list[BlockAsk]] = []

    def propose(self, asks: list[BlockAsk]) -> list[Scripted]:
        self.asked.append(asks)
        return self.proposals[: len(asks)]


def job(k: int, params: SamplingParams = GREEDY) -> DraftJob:
    return DraftJob(k=k, picker=TokenPicker(params, vocab=VOCAB, prompt=[1]), block_table=[0])


def drafter(slot: int = 0, anchor: int = 2, start: int = 10) -> BlockDrafter:
    made = BlockDrafter(slot)
    made.observe(start, [anchor], torch.zeros(1, 1))
    return made


def test_each_draft_follows_the_one_before() -> None:
    runner = Runner(Scripted(7))
    assert draft_blocks([(drafter(), job(4))], runner) == [[3, 4, 5, 6]]
    assert runner.asked == [[BlockAsk(slot=0, start=10, anchor=2, k=4)]]


def test_all_that_want_drafts_share_one_pass() -> None:
    runner = Runner(Scripted(7), Scripted(7, step=2))
    jobs = [
        (drafter(0), job(2)),
        (drafter(1), job(0)),
        (drafter(2, anchor=1), job(3)),
        (BlockDrafter(3), job(3)),
    ]
    assert draft_blocks(jobs, runner) == [[3, 4], [], [3, 5, 7], []]
    assert [ask.slot for ask in runner.asked[0]] == [0, 2]
    assert draft_blocks([(drafter(), job(0))], runner) == [[]]
    assert len(runner.asked) == 1, "nobody asks for nothing"


def test_drafts_end_where_the_drafter_stops_believing() -> None:
    assert draft_blocks([(drafter(), job(7))], Runner(Scripted(7, sure=2))) == [[3, 4]]


def test_a_broken_row_costs_the_drafts_after_it() -> None:
    assert draft_blocks([(drafter(), job(7))], Runner(Scripted(7, broken=3))) == [[3, 4, 5]]


def test_no_more_than_the_block_has() -> None:
    assert draft_blocks([(drafter(), job(7))], Runner(Scripted(3))) == [[3, 4, 5]]


def test_the_history_is_looked_ahead_in_and_given_back() -> None:
    params = SamplingParams(seed=0, temperature=0.0, presence_penalty=9.0)
    asked = job(6, params)
    drafts = draft_blocks([(drafter(), asked)], Runner(Scripted(7, step=0)))
    assert len(set(drafts[0])) > 1, "a draft that was just drafted is penalised"
    assert drafts == draft_blocks([(drafter(), asked)], Runner(Scripted(7, step=0)))


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_is_the_sigmoid_of_hidden_and_token_before(with_markov: bool) -> None:
    """Slots are kept while it is at least one half."""
    target = tiny_model()
    made = drafter_of(target, "dspark", confidence_head_with_markov=with_markov)
    heads = BlockHeads(made, target.model)
    hidden = torch.randn(5, target.dims.hidden, generator=torch.Generator().manual_seed(1))
    rows = MarkovRows(heads, torch.zeros(5, target.dims.vocab), hidden)
    weight = made.heads["confidence_head.proj.weight"][0]
    bias = made.heads["confidence_head.proj.bias"][0]
    for k in range(5):
        for before in (3, 40):
            features = [hidden[k]] + [made.heads["markov_head.markov_w1.weight"][before]] * with_markov
            sure = torch.sigmoid(torch.cat(features) @ weight + bias) >= 0.5
            assert rows.stands(k, before) == bool(sure)
