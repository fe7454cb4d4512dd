"""Chains of the MTP head, on the stand-in model."""

from __future__ import annotations

import torch

from services.gpu_worker.engine.drafters.base import DraftJob
from services.gpu_worker.engine.drafters.mtp import BACKLOG_ROWS, MtpDrafter, draft_chains
from services.gpu_worker.engine.requests import SamplingParams
from services.gpu_worker.engine.sampling import TokenPicker
from tests.session_kit import VOCAB, StandIn

PREFIX = (3, 4, 5)


def setup(model: StandIn, tokens: tuple[int, ...], k: int) -> tuple[MtpDrafter, DraftJob]:
    """A drafter that knows `tokens` after PREFIX, with the true hiddens of the rows before them."""
    drafter = MtpDrafter()
    hiddens = model._hiddens(PREFIX[:-1], (PREFIX[-1], *tokens))[: len(tokens)]
    drafter.observe(len(PREFIX), tokens, hiddens)
    params = SamplingParams(seed=1, temperature=1.0, frequency_penalty=0.7)
    picker = TokenPicker(params, vocab=VOCAB, prompt=PREFIX)
    return drafter, DraftJob(k=k, picker=picker, block_table=[0])


def test_a_chain_of_k_costs_k_calls_whatever_the_catch_up() -> None:
    model = StandIn()
    (drafts,) = draft_chains([setup(model, (7, 8, 9), 4)], model)
    assert len(drafts) == 4
    assert model.drafts == 4


def test_drafts_do_not_depend_on_company_or_depth() -> None:
    model = StandIn()
    alone = draft_chains([setup(model, (7,), 5)], model)[0]
    crowd = draft_chains(
        [setup(model, (9, 9), 2), setup(model, (7,), 5), setup(model, (6,), 0), setup(model, (7,), 3)], model
    )
    assert crowd == [crowd[0], alone, [], alone[:3]]


def test_history_is_left_as_it_was() -> None:
    model = StandIn()
    drafter, job = setup(model, (7,), 4)
    draft_chains([(drafter, job)], model)
    assert not job.picker._counts.any()
    assert drafter.backlog == 0


def test_without_drafts_rows_wait_until_there_are_enough() -> None:
    model = StandIn()
    drafter, job = setup(model, tuple(range(3, 3 + BACKLOG_ROWS - 1)), 0)
    assert draft_chains([(drafter, job)], model) == [[]]
    assert model.drafts == 0
    drafter, job = setup(model, tuple(range(3, 3 + BACKLOG_ROWS)), 0)
    assert draft_chains([(drafter, job)], model) == [[]]
    assert (model.drafts, drafter.backlog) == (1, 0)


def test_a_broken_row_ends_its_own_chain_and_no_request() -> None:
    model = StandIn()
    good = draft_chains([setup(model, (7,), 4)], model)[0]
    model.poisoned.add((*PREFIX, 7, *good[:2]))
    broken, other = draft_chains([setup(model, (7,), 4), setup(model, (8,), 4)], model)
    assert broken == good[:2]
    assert len(other) == 4


def test_observed_rows_follow_one_another() -> None:
    drafter = MtpDrafter()
    drafter.observe(10, [1, 2], torch.zeros(2, 1))
    drafter.observe(12, [3], torch.ones(1, 1))
    rows = drafter.take([5])
    assert (rows.start, rows.tokens, rows.hiddens[:, 0].tolist()) == (10, [1, 2, 3], [0.0, 0.0, 1.0])
