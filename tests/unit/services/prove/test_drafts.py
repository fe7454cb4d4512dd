"""The family of drafters on families of models: all pairs are tried, and a fault of either is found."""

from __future__ import annotations

import pytest
from torch import Tensor

from services.gpu_worker.engine.drafters.ngram import NgramDrafter
from services.gpu_worker.engine.models.dense import DenseModel
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.prove import drafts
from services.prove.axes import DRAFTERS
from services.prove.drafts import PACES, tried
from services.prove.models import EVERY, HAS

WAY = "n-gram K=7"


def test_trials_have_names_of_their_own_and_a_whole_run_has_every_pair() -> None:
    names = [trial.name for trial in drafts.family(True, 0)]
    assert len(set(names)) == len(names)
    pairs = {tuple(name.split(" / ")[:2]) for name in names}
    drafting = {name: way.kind for name, way in DRAFTERS.items() if way.k}
    assert pairs == {
        (model, name) for model in EVERY for name, kind in drafting.items() if kind in HAS[model]
    }
    assert {kind for name, kind in drafting.items()} == {kind for kinds in HAS.values() for kind in kinds}


def test_c1_4_a_sound_engine_gives_the_streams_of_plain_decode() -> None:
    verdict = tried("llama", WAY, PACES[0])
    assert not verdict.differences
    assert verdict.compared["tokens"] == 2 * len(drafts.CAST) * drafts.SAID
    assert verdict.compared["prompts found cached"] == 2


def test_a_token_that_drafting_changes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts.reference("llama")
    settle = SpecSession.settle

    def trusting(self: SpecSession, proposed: list[int], rows: list[object], hidden: Tensor) -> int:
        """Takes half of the drafts unseen."""
        few = proposed[: (len(proposed) + 1) // 2]
        picks = self.completion.decide
        told = iter(few)
        monkeypatch.setattr(self.completion, "decide", lambda pick: next(told, None) or picks(pick))
        return settle(self, proposed, rows, hidden)  # type: ignore[arg-type]

    monkeypatch.setattr(SpecSession, "settle", trusting)
    assert "tokens" in {difference.kind for difference in tried("llama", WAY, PACES[0]).differences}


def test_a_row_that_depends_on_its_company_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts.reference("llama")
    embed = DenseModel.embed

    def leaking(self: DenseModel, tokens: Tensor) -> Tensor:
        return embed(self, tokens) * (1 + 1e-6 * (4 < len(tokens) < 64))

    monkeypatch.setattr(DenseModel, "embed", leaking)
    assert "kv rows" in {difference.kind for difference in tried("llama", WAY, PACES[0]).differences}


def test_a_drafter_that_never_drafts_shows_nothing_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts.reference("llama")
    monkeypatch.setattr(NgramDrafter, "propose", lambda *_, **__: [])
    kinds = [difference.kind for difference in tried("llama", WAY, PACES[0]).differences]
    assert kinds == ["drafts", "drafts"]


def test_every_family_of_models_is_tried() -> None:
    assert {trial.name.split(" / ")[0] for trial in drafts.family(True, 0)} == EVERY.keys()
