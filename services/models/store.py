"""The model folders on this machine.

    <root>/<name>/              whole, always
    <root>/.<name>.lock         held by whoever adds or removes; the kernel drops it when its holder dies
    <root>/.adding-<name>-*     a folder in the making, or what a killed one left: the next holder of the lock deletes it

A folder is made beside its place, brought to the disk and renamed; it is renamed away before it is deleted. So a reader finds
a whole folder or none, whenever a writer is killed, and two writers come one after the other.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from services.models.catalogue import KNOWN, Known
from services.models.faults import ModelFault

Make = Callable[[Path, Path], None]
"""(scratch folder, the model's folder, empty) -> the latter filled. Both are deleted when it fails."""


class Store:
    """`root` need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root: Final = root

    def path(self, name: str) -> Path:
        """Where a model lies or would lie."""
        return self.root / name

    def has(self, name: str) -> bool:
        return (self.path(name) / "config.json").is_file()

    def names(self) -> list[str]:
        """Of the models that are here, known ones alone."""
        return [name for name in sorted(KNOWN) if self.has(name)]

    def add(self, known: Known, make: Make, *, waits: Callable[[], None] = lambda: None) -> bool:
        """Have the model here; False if it was. `waits` is called when another process holds the lock.

        Raises:
            ModelFault: no room, no right to write, or whatever `make` raises.
        """
        with self._disk_faults(), self._locked(known.name, waits):
            if self.has(known.name):
                return False
            if self.path(known.name).exists():
                raise ModelFault(
                    f"{self.path(known.name)} is there and holds no model; burstline model remove {known.name} deletes it"
                )
            self._require_room(known)
            with tempfile.TemporaryDirectory(prefix=f".adding-{known.name}-", dir=self.root) as place:
                scratch, folder = Path(place) / "scratch", Path(place) / known.name
                scratch.mkdir()
                folder.mkdir()
                make(scratch, folder)
                _sync(folder)
                folder.rename(self.path(known.name))
                _sync(self.root)
        return True

    def remove(self, name: str) -> bool:
        """Delete a model; False if it was not here. A process that has it open keeps what it has.

        Raises:
            ModelFault: no right to.
        """
        if not self.root.is_dir():
            return False
        with self._disk_faults(), self._locked(name):
            if not self.path(name).exists():
                return False
            with tempfile.TemporaryDirectory(prefix=f".adding-{name}-", dir=self.root) as place:
                self.path(name).rename(Path(place) / name)
        return True

    @contextmanager
    def _locked(self, name: str, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Alone with this name; what killed holders left is deleted first."""
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            for left in self.root.glob(f".adding-{name}-*"):
                shutil.rmtree(left)
            yield
        finally:
            os.close(descriptor)

    def _require_room(self, known: Known) -> None:
        free = shutil.disk_usage(self.root).free
        if free < known.room_bytes:
            raise ModelFault(
                f"{known.name} needs {known.room_bytes >> 20} MiB while it is added, but only {free >> 20} MiB are free at "
                f"{self.root}. Free some room, or choose another folder by BURSTLINE_MODELS_DIR."
            )

    @contextmanager
    def _disk_faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelFault(
                f"cannot write {error.filename or self.root}: {error.strerror}. Free some room, or choose another folder by "
                "BURSTLINE_MODELS_DIR."
            ) from error


def _sync(folder: Path) -> None:
    """Have a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
