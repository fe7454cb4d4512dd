"""The family of streams that follow a grammar: it finds nothing in a sound engine, and what is broken in others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from services.gpu_worker.engine.grammar import Allowed, GrammarState
from services.gpu_worker.engine.sampling import TokenPicker
from services.gpu_worker.engine.sessions.completion import Completion
from services.prove import grammars
from services.prove.axes import DRAFTERS
from services.prove.compare import Verdict
from services.prove.drafts import PACES
from services.prove.grammars import CAST, MODELS, QUICK, TURNS, tried
from services.prove.models import HAS


def run() -> Verdict:
    return tried("tiny", "n-gram K=7", PACES[0])


def kinds(verdict: Verdict) -> set[str]:
    return {difference.kind for difference in verdict.differences}


def test_trials_have_names_of_their_own_and_a_whole_run_has_every_drafter_of_its_models() -> None:
    names = [trial.name for trial in grammars.family(True, 0)]
    assert len(set(names)) == len(names)
    drafting = {name: way.kind for name, way in DRAFTERS.items() if way.k}
    pairs = {tuple(name.split(" / ")[:2]) for name in names}
    assert pairs == {
        (model, name) for model in MODELS for name, kind in drafting.items() if kind in HAS[model]
    }
    assert [trial.name.split(" / ")[:2] for trial in grammars.family(False, 0)] == [
        list(way) for way in QUICK
    ]


def test_fr_40_a_sound_engine_gives_the_streams_of_plain_decode() -> None:
    verdict = run()
    assert not verdict.differences
    assert verdict.compared["ending"] == len(CAST) * len(TURNS)
    assert verdict.compared["tokens"] > 300
    assert verdict.compared["journalled tokens under a grammar"] == 1


def _allows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One mask in seven is not applied."""
    plain, asked = GrammarState.allowed, iter(range(1 << 30))

    def allowed(self: GrammarState) -> Allowed:
        return np.ones_like(plain(self)) if next(asked) % 7 == 5 else plain(self)

    monkeypatch.setattr(GrammarState, "allowed", allowed)


def _keeps_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that a drafter tried are never taken back from the history."""
    monkeypatch.setattr(GrammarState, "forget", lambda self: None)


def _forgets_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is resumed walks its grammar from the beginning."""
    plain, take = TokenPicker.record, Completion.take

    def without(self: Completion, token: int, logprob: object) -> bool:
        silent = self.replaying
        monkeypatch.setattr(TokenPicker, "record", (lambda *_: None) if silent else plain)
        return take(self, token, logprob)  # type: ignore[arg-type]

    monkeypatch.setattr(Completion, "take", without)


@pytest.mark.parametrize("plant", [_allows_all, _keeps_drafts, _forgets_the_journal])
def test_what_is_broken_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    grammars.reference("tiny")
    plant(monkeypatch)
    assert kinds(tried("tiny", "mtp K=3", PACES[0])) & {"tokens", "ending"}


def test_a_stream_that_breaks_its_grammar_is_found_in_the_reference_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GrammarState, "allowed", lambda self: np.ones(4096, dtype=np.bool_))
    monkeypatch.setattr(grammars, "reference", grammars.reference.__wrapped__)
    assert "tokens that the grammar takes" in kinds(run())
