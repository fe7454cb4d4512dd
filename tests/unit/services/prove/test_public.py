"""The family of the public model, tried on a made-up one with its layout; the real one is tried by `prove --full`."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gpu_worker.engine.drafters.ngram import NgramDrafter
from services.models.catalogue import KNOWN
from services.models.folder import convert
from services.prove import public
from tests.unit.services.models.made_up import llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("public")
    writer, _ = llama()
    writer.fields["llama.context_length"] = (4, 1024)
    (root / public.NAME).mkdir()
    convert(writer.write(root / "a.gguf"), KNOWN[public.NAME], root / public.NAME)
    return root / public.NAME


def test_without_the_model_there_is_no_trial_and_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURSTLINE_MODELS_DIR", str(tmp_path))
    assert public.family(True, 1) == []
    assert "burstline model add smollm2" in public.absence()


def test_with_the_model_a_whole_run_has_one_trial_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURSTLINE_MODELS_DIR", str(folder.parent))
    assert public.absence() == ""
    assert [trial.name for trial in public.family(True, 1)] == ["smollm2"]
    assert public.family(False, 1) == [], "a quick run has no minutes for it"


def test_c1_4_a_sound_engine_gives_the_streams_of_plain_decode(folder: Path) -> None:
    verdict = public.tried(folder)
    assert verdict.differences == []
    assert verdict.compared["ending"] == 2 * len(public.CAST) * len(public.MANNERS)


def test_a_drafter_that_never_drafts_shows_nothing_and_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NgramDrafter, "propose", lambda *_, **__: [])
    kinds = {difference.kind for difference in public.tried(folder).differences}
    assert kinds == {"drafts"}
