"""Files of the data folder: private, replaced atomically, never grown without a limit."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import Final

from services.embedded.faults import EmbeddedFault

LOG_LIMIT_BYTES: Final = 16 << 20
MIB: Final = 1 << 20
ELSEWHERE: Final = "choose another folder by BURSTLINE_DATA_DIR (the demo: by --data-dir)."


def private_folder(path: Path, mode: int = 0o700) -> Path:
    """Make `path` (and its parents); if it was made here it has `mode`, by default ours alone.

    Raises:
        EmbeddedFault: it cannot be made or written.
    """
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise EmbeddedFault(
            f"cannot make the folder {path}: {error.strerror}. Make it yours, or {ELSEWHERE}"
        ) from error
    return path


def write_private(path: Path, text: str) -> None:
    """Replace `path` by `text`, mode 0600: a reader sees the old text or the new one, whatever happens.

    Raises:
        EmbeddedFault: the folder cannot be written, or there is no room.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise EmbeddedFault(
            f"cannot write {path}: {error.strerror}. Free some room, or {ELSEWHERE}"
        ) from error


def secret(path: Path) -> str:
    """The secret kept in `path`, made on first use (32 URL-safe characters)."""
    if not path.exists():
        write_private(path, secrets.token_urlsafe(24))
    return path.read_text(encoding="utf-8").strip()


def require_room(path: Path, needed_bytes: int, purpose: str) -> None:
    """Raise EmbeddedFault unless the file system of `path` has `needed_bytes` free for us."""
    free = shutil.disk_usage(path).free
    if free < needed_bytes:
        raise EmbeddedFault(
            f"{purpose} needs {needed_bytes // MIB} MiB, but only {free // MIB} MiB are free at {path}. "
            f"Free some room, or {ELSEWHERE}"
        )


def limit_log(path: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
    """Keep a log that other processes append to below about `limit_bytes`: the old text moves to `<name>.1`."""
    if path.exists() and path.stat().st_size > limit_bytes:
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)  # writers append, so they go on at the new end


def tail(path: Path, lines: int = 15, *, began: int = 0) -> str:
    """The last `lines` lines of a log, for a fault's message; '' without a log.

    `began`: the size that it had when the process in question started, so that what an earlier one said is left out.
    """
    if not path.exists():
        return ""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(began if began <= size else 0, size - 16_384))  # a smaller log was cut meanwhile
        text = file.read().decode("utf-8", "replace")
    return "\n".join(text.splitlines()[-lines:])


class FolderLock:
    """One supervisor a data folder. The kernel drops the lock when its holder dies, however it dies."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "stack.lock"
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def take(self) -> None:
        """Take the lock, or raise EmbeddedFault naming the holder's pid."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EmbeddedFault(
                f"cannot write {self._path}: {error.strerror}. Make it yours, or {ELSEWHERE}"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise EmbeddedFault(
                f"a stack already runs on {self._path.parent} (process {holder}). Stop it, or {ELSEWHERE}"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give it back. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
