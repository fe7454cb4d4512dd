"""Rows that lie on a card: picked together ahead of time, with what each would have been picked as alone."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from typing import Any

import numpy as np
import pytest
import torch

from kernels import dispatch, sampling
from services.gpu_worker.engine.card_logits import Ask, CardLogits, CardRow, decide
from services.gpu_worker.engine.requests import SamplingParams
from services.gpu_worker.engine.sampling import TokenPicker

VOCAB = 50
RULES = (
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2, temperature=1.0),
    SamplingParams(seed=3, temperature=0.8, top_k=5),
)
PENALISED = SamplingParams(seed=4, temperature=0.0, presence_penalty=0.5)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every launch that picks."""
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    counted: list[int] = []
    pick = sampling.pick

    def watched(logits: torch.Tensor, plan: Any) -> Any:
        counted.append(len(logits))
        return pick(logits, plan)

    monkeypatch.setattr(sampling, "pick", watched)
    return counted


def _rows(count: int) -> list[CardRow]:
    generator = torch.Generator().manual_seed(1)
    return CardLogits(torch.randn(count, VOCAB, generator=generator) * 3).numpy()


def test_rows_are_picked_together_as_each_would_be_alone(launches: list[int]) -> None:
    pickers = [TokenPicker(rules, vocab=VOCAB, prompt=(), choice=i) for i, rules in enumerate(RULES)]
    alone = [picker.pick(row, 7 + i) for i, (picker, row) in enumerate(zip(pickers, _rows(3), strict=True))]
    assert launches == [1, 1, 1]
    rows = _rows(3)
    decide(rows, (picker.ask(7 + i) for i, picker in enumerate(pickers)))
    assert [
        picker.pick(row, 7 + i) for i, (picker, row) in enumerate(zip(pickers, rows, strict=True))
    ] == alone
    assert launches == [1, 1, 1, 3], "what was told is not asked again"


def test_another_position_is_picked_anew(launches: list[int]) -> None:
    (row,) = _rows(1)
    decide([row], [Ask(RULES[1], 7, 0)])
    told = [row.pick(RULES[1], position, 0) for position in (7, 8, 8)]
    assert launches == [1, 1]
    assert told[1] == told[2] == _rows(1)[0].pick(RULES[1], 8, 0)


def test_what_the_host_must_pick_is_left_to_it(launches: list[int]) -> None:
    picker = TokenPicker(PENALISED, vocab=VOCAB, prompt=(1, 2))
    rows = _rows(2)
    decide(rows, [picker.ask(3), picker.ask(4)])
    decide(np.zeros((1, VOCAB), dtype=np.float32), [Ask(RULES[0], 1, 0)])
    assert launches == []
    assert picker.pick(rows[0], 3) == picker.pick(np.asarray(rows[0]), 3)
