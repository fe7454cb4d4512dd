"""Which user a server runs as. Postgres refuses root, so as root it runs as `nobody`, who may not reach every folder."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from services.embedded.faults import EmbeddedFault


@dataclass(frozen=True, kw_only=True)
class Account:
    """A user and a group that a child runs as."""

    uid: int
    gid: int


def server_account() -> Account | None:
    """`nobody` when we are root, else None: stay who we are."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError as error:
        raise EmbeddedFault(
            "Postgres does not run as root, and this system has no user `nobody`. Start as a normal user, or set "
            "BURSTLINE_DATABASE_URL to a server of yours."
        ) from error
    return Account(uid=entry.pw_uid, gid=entry.pw_gid)


def can_reach(account: Account, path: Path) -> bool:
    """Whether `account` may walk down to `path` (search permission on every existing folder above it)."""
    for folder in path.resolve().parents:
        if not folder.exists():
            continue
        status = folder.stat()
        if status.st_uid == account.uid:
            allowed = status.st_mode & stat.S_IXUSR
        elif status.st_gid == account.gid:
            allowed = status.st_mode & stat.S_IXGRP
        else:
            allowed = status.st_mode & stat.S_IXOTH
        if not allowed:
            return False
    return True


def give(path: Path, account: Account | None) -> None:
    """Make `account` the owner of `path` alone (its content was made by that account already)."""
    if account is not None:
        shutil.chown(path, account.uid, account.gid)
