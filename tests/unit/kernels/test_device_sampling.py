"""The pick as device kernels, interpreted, against their twins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.gate.picking import Rules
from kernels.sampling import PickPlan, device_pickable, reference
from kernels.sampling import device as card

SPLIT = 16


RULES = (
    Rules(temperature=0.0),
    Rules(seed=7),
    Rules(seed=2**64 - 3, temperature=0.6),
    Rules(seed=1 << 40, temperature=1.7, min_p=0.05),
    Rules(seed=11, temperature=0.7, top_k=20, top_p=0.8),
    Rules(seed=12, top_k=1),
    Rules(seed=13, top_k=64, top_p=0.3),
    Rules(seed=14, temperature=2.0, top_k=5, min_p=0.2),
)

KINDS = (RULES[0], RULES[1], RULES[4])
"""One of each way through the kernels: greedy, the whole vocabulary, truncated."""


def _plan(columns: int, vocab: int, rules: tuple[Rules, ...] = RULES) -> PickPlan:
    plan = PickPlan.empty(len(rules), columns)
    plan.fill(rules, range(len(rules)), vocab=vocab)
    plan.starts.copy_(torch.arange(len(rules)) * 63 + 1)
    return plan


def _logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` answers holds NaN, or an id that no vocabulary has."""
    real: Callable[..., Tensor] = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        made = real(*args, **kwargs)
        return made.fill_(torch.nan if made.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize(("vocab", "columns"), [(5, 1), (15, 2), (16, 1), (17, 2), (33, 1), (100, 1)])
def test_picks_are_the_twins(vocab: int, columns: int) -> None:
    plan = _plan(columns, vocab)
    logits = _logits(len(RULES) * columns, vocab, vocab)
    told = card.pick(logits, plan, split=SPLIT, logprobs=True)
    expected = reference.pick(logits, plan, logprobs=True)
    assert torch.equal(told.ids, expected.ids)
    assert told.logprobs is not None
    assert expected.logprobs is not None
    torch.testing.assert_close(told.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_its_company() -> None:
    plan, logits = _plan(2, 60, RULES[1:6:2]), _logits(6, 60)
    whole = card.pick(logits, plan, split=SPLIT, logprobs=True)
    for number, rules in enumerate(RULES[1:6:2]):
        alone = PickPlan.empty(1, 2)
        alone.fill([rules], [number], vocab=60)
        alone.starts[0] = plan.starts[number]
        rows = slice(2 * number, 2 * number + 2)
        told = card.pick(logits[rows].clone(), alone, split=SPLIT, logprobs=True)
        assert torch.equal(told.ids, whole.ids[rows])
        assert whole.logprobs is not None
        assert torch.equal(told.logprobs, whole.logprobs[rows])


def test_a_plan_without_truncation_leaves_the_sort_out() -> None:
    rules = RULES[:4]
    plan, logits = _plan(1, 70, rules), _logits(len(rules), 70)
    short = dataclasses.replace(plan, truncate=False)
    assert torch.equal(card.pick(logits, short, split=SPLIT).ids, card.pick(logits, plan, split=SPLIT).ids)
    with pytest.raises(ValueError, match="truncates"):
        short.fill(RULES[4:5], [0], vocab=70)


@pytest.mark.parametrize("rules", [RULES[0], RULES[4]])
def test_ties_pick_the_smallest_id(rules: Rules) -> None:
    logits = torch.full((1, 100), -2.0)  # more ids than a split keeps reach the bound
    logits[0, [70, 40, 99]] = 5.0
    plan = _plan(1, 100, (rules,))
    assert card.pick(logits, plan, split=SPLIT).ids.item() == reference.pick(logits, plan).ids.item()
    if rules.temperature == 0.0:
        assert card.pick(logits, plan, split=SPLIT).ids.item() == 40


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_row_is_flagged_and_alone(broken: float) -> None:
    plan, logits = _plan(1, 60, KINDS), _logits(len(KINDS), 60)
    whole = card.pick(logits, plan, split=SPLIT).ids
    for row in range(len(KINDS)):
        bad = logits.clone()
        bad[row, 47] = broken
        told = card.pick(bad, plan, split=SPLIT).ids
        assert told[row] == -1
        assert torch.equal(told, reference.pick(bad, plan).ids)
        assert torch.equal(told[:row], whole[:row])
        assert torch.equal(told[row + 1 :], whole[row + 1 :])


def test_a_row_without_any_finite_logit_is_flagged() -> None:
    plan = _plan(1, 60, KINDS)
    assert card.pick(torch.full((len(KINDS), 60), -torch.inf), plan, split=SPLIT).ids.eq(-1).all()


def test_masked_logits_are_never_picked() -> None:
    plan, logits = _plan(1, 100, KINDS), torch.full((len(KINDS), 100), -torch.inf)
    logits[:, [3, 64, 98]] = _logits(len(KINDS), 3)
    told = card.pick(logits, plan, split=SPLIT).ids
    assert set(told.tolist()) <= {3, 64, 98}
    assert torch.equal(told, reference.pick(logits, plan).ids)


def test_a_subset_head_picks_by_the_ids_of_the_vocabulary() -> None:
    """A head over all ids in another order is the same head: noise, ties and answers go by id."""
    vocab = 60
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(5)).int()
    plan, logits = _plan(1, vocab, KINDS), _logits(len(KINDS), vocab).round()
    whole = card.pick(logits, plan, split=SPLIT).ids
    mapped = logits[:, order.long()].contiguous()
    assert torch.equal(card.pick(mapped, plan, id_map=order, split=SPLIT).ids, whole)
    assert torch.equal(reference.pick(mapped, plan, id_map=order).ids, whole)
    few = order[:37].contiguous()
    part = logits[:, few.long()].contiguous()
    assert torch.equal(
        card.pick(part, plan, id_map=few, split=SPLIT).ids, reference.pick(part, plan, id_map=few).ids
    )


@pytest.mark.parametrize(
    ("rules", "top_logprobs", "holds"),
    [
        (Rules(), None, True),
        (Rules(), 0, True),
        (Rules(), 1, False),
        (Rules(temperature=0.0, top_p=0.5), None, True),
        (Rules(top_p=0.5), None, False),
        (Rules(top_p=0.5, top_k=64), None, True),
        (Rules(top_k=65), None, False),
        (Rules(presence_penalty=0.1), None, False),
        (Rules(temperature=0.0, repetition_penalty=1.1), None, False),
        (Rules(frequency_penalty=0.1), None, False),
        (Rules(logit_bias=((1, 1.0),)), None, False),
        (Rules(min_tokens=1), None, False),
        (Rules(allowed_ids=frozenset({1})), None, False),
        (Rules(banned_ids=frozenset({1})), None, False),
    ],
)
def test_one_rule_says_which_streams_are_picked_on_the_device(
    rules: Rules, top_logprobs: int | None, holds: bool
) -> None:
    assert device_pickable(rules, top_logprobs=top_logprobs) is holds
    if not holds and top_logprobs is None:
        with pytest.raises(ValueError, match="on the host"):
            PickPlan.empty(1, 1).fill([rules], [0], vocab=100)
