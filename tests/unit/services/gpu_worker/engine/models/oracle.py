"""How a trunk is held against transformers' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.unit.services.gpu_worker.engine.rig import Line

GREEDY_IDS = 64


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected magnitude."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def assert_the_oracles_logits_and_ids(
    line: Line, oracle: Any, prompt: list[int], cuts: tuple[int, ...]
) -> None:
    """Prefill logits, in chunks of `cuts`, within 1e-5; then greedy ids of both, ours by verifies of one column."""
    logits = line.rig.runner.logits(line.prefill(prompt, cuts))
    assert relative(logits, oracle(torch.tensor([prompt])).logits[0]) <= 1e-5
    ids = [int(logits[-1].argmax())]
    for _ in range(GREEDY_IDS - 1):
        ids.append(int(line.rig.runner.logits(line.verify(ids[-1:]))[0].argmax()))
    theirs = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=GREEDY_IDS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :]
    assert ids == theirs.tolist()
