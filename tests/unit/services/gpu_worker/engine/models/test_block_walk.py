"""Drafts picked where the rows lie: those that the host would have picked, of every family of drafters."""

from __future__ import annotations

import pytest
import torch

from kernels.sampling import PickPlan
from services.gpu_worker.engine.batch import BlockAsk
from services.gpu_worker.engine.drafters.base import DraftJob
from services.gpu_worker.engine.drafters.block import BlockDrafter, draft_blocks
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.block_heads import Proposal
from services.gpu_worker.engine.requests import SamplingParams
from services.gpu_worker.engine.sampling import TokenPicker
from tests.block_kit import VARIANTS, drafter_of
from tests.engine_kit import tiny_model

STARTS, ANCHORS, SLOTS = (70, 41), (5, 9), (1, 0)
RULES = (
    SamplingParams(seed=3, temperature=0.0),
    SamplingParams(seed=4, temperature=0.9, top_k=12, top_p=0.9),
)


class Told:
    """The part of the runner that proposals come from."""

    def __init__(self, context: BlockContext) -> None:
        self._context = context

    def propose(self, asks: list[BlockAsk]) -> list[Proposal]:
        return self._context.propose(asks)


def _context(variant: str, **fields: object) -> BlockContext:
    target = tiny_model()
    context = BlockContext(drafter_of(target, variant, **fields), target.model, num_slots=2, num_snapshots=0)
    generator = torch.Generator().manual_seed(7)
    width = len(context.dims.taps) * context.dims.hidden
    for slot, start in zip(SLOTS, STARTS, strict=True):
        context.primed(slot, 0, torch.randn(start, width, generator=generator))
    return context


def _by_host(context: BlockContext, k: int) -> list[list[int]]:
    jobs = []
    for slot, start, anchor, rules in zip(SLOTS, STARTS, ANCHORS, RULES, strict=True):
        drafter = BlockDrafter(slot)
        drafter.start, drafter.anchor = start, anchor
        picker = TokenPicker(rules, vocab=context.dims.vocab, prompt=[1])
        jobs.append((drafter, DraftJob(k=k, picker=picker, block_table=())))
    return draft_blocks(jobs, Told(context))


def _by_card(context: BlockContext, k: int) -> list[list[int]]:
    plan = PickPlan.empty(2, 1)
    plan.fill(RULES, [0, 0], vocab=context.dims.vocab)
    slots, starts, anchors = (torch.tensor(one, dtype=torch.int32) for one in (SLOTS, STARTS, ANCHORS))
    drafts, believed = context.draft(slots, starts, torch.zeros(2), anchors, k, plan)
    return [row[:count] for row, count in zip(drafts.tolist(), believed.tolist(), strict=True)]


@pytest.mark.parametrize("k", [2, 7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cards_walk_drafts_what_the_host_would(variant: str, k: int) -> None:
    context = _context(variant)
    expected = _by_host(context, k)
    assert _by_card(context, k) == expected
    assert max(map(len, expected)) == min(k, context.dims.drafts) or variant == "dspark"


def test_confidence_leaves_drafts_out() -> None:
    """Of random drafters some believe in their first drafts alone, and the two ways leave out the same ones."""
    lengths = set()
    for seed in range(6):
        context = _context("dspark", seed=seed)
        expected = _by_host(context, 5)
        assert _by_card(context, 5) == expected
        lengths |= set(map(len, expected))
    assert len(lengths) > 1


def test_rows_that_a_card_takes_in_are_those_that_the_host_would() -> None:
    """Rows of the last verify, beside rows that are nobody's."""
    taken, settled = _context("dflash2"), _context("dflash2")
    rows = torch.randn(3, len(taken.dims.taps) * taken.dims.hidden)
    settled.seen(1, 70, rows)
    settled.accepted(1, 2)
    settled.settle([1])
    slots = torch.tensor([1, 1, taken.scratch])
    taken.take_in(rows, slots, torch.tensor([70, 71, 72]))
    taken.took_in(1, 72)
    assert taken.covers(1, 72)
    for mine, theirs in ((taken.ring.k, settled.ring.k), (taken.ring.v, settled.ring.v)):
        torch.testing.assert_close(mine[:, : taken.scratch], theirs[:, : taken.scratch])


def test_what_a_round_cannot_take_in_is_taken_in_before_it() -> None:
    context = _context("dflash")
    rows = torch.randn(5, len(context.dims.taps) * context.dims.hidden)
    context.seen(1, 70, rows)
    context.accepted(1, 5)
    handed = context.hand_over(1, 75, most=8)
    assert handed is not None
    assert torch.equal(handed, rows)
    assert context.waiting(1) == 0

    context.seen(1, 75, rows)
    context.accepted(1, 5)
    handed = context.hand_over(1, 80, most=4)
    assert handed is not None
    assert len(handed) == 0
    assert context.ring.end(1) == 80


def test_r_d2_a_slot_that_lacks_rows_is_handed_nothing() -> None:
    context = _context("dflash")
    context.seen(1, 75, torch.randn(2, len(context.dims.taps) * context.dims.hidden))
    context.accepted(1, 2)
    assert context.hand_over(1, 77, most=8) is None
