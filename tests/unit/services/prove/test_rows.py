"""The family of whole-model rows: a sound model leaves the same bits in any company, and each kind of leak is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.models.hybrid import HybridModel
from services.gpu_worker.engine.runner import ModelRunner
from services.prove import rows
from services.prove.models import EVERY, tiny
from services.prove.rows import ALL, SAID, SOME, Sizes, tried

FEW = Sizes(lengths=(65,), sequences=(1, 5), columns=(3,))


def kinds(sizes: Sizes = FEW) -> set[str]:
    return {difference.kind for difference in tried(tiny(), "tiny", sizes, 1).differences}


def test_c1_1_a_sound_model_leaves_the_same_bits_in_any_company() -> None:
    verdict = tried(tiny(), "tiny", SOME, 1)
    assert verdict.differences == []
    assert verdict.compared["hidden rows"] == 6 * SAID
    assert verdict.compared["recurrent state"] == 6


def test_a_whole_run_has_every_model_and_the_edges_of_chunks_splits_and_pages() -> None:
    assert {trial.name for trial in rows.family(True, 0)} == set(EVERY)
    assert {63, 64, 65, 255, 256, 257} <= set(ALL.lengths)
    assert list(ALL.lengths) == sorted(ALL.lengths)
    assert (max(ALL.sequences), max(ALL.columns)) == (64, 16)


def _scaled(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same, off by a bit where there are many rows."""

    def leaking(self: Any, given: Tensor, *rest: Any) -> Any:
        return method(self, given, *rest) * (1 + 1e-6 * (len(given) > 3))

    return leaking


def test_rows_that_depend_on_their_number_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HybridModel, "embed", _scaled(HybridModel.embed))
    assert {"hidden rows", "kv rows", "recurrent state", "logits"} <= kinds()


def test_a_row_that_another_sequence_writes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = ModelRunner.verify

    def stray(self: ModelRunner, asked: Any) -> list[Tensor]:
        out = verify(self, asked)
        if len(asked) > 1:
            first = min(asked, key=lambda row: row.slot)
            self._kv.k[0, first.block_table[0], 0, 3, 1] += 1.0
        return out

    monkeypatch.setattr(ModelRunner, "verify", stray)
    assert "kv rows" in kinds()


def test_a_state_that_takes_a_rejected_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = StatePool.digest

    def other(self: StatePool, slot: int) -> bytes:
        if self.num_slots == 5 and bool(torch.any(self.state[:, 1])):  # the company has been there
            self.state[0, slot, 0, 0, 0] += 1.0
        return digest(self, slot)

    monkeypatch.setattr(StatePool, "digest", other)
    assert kinds() == {"recurrent state"}
