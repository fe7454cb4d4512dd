"""`stack.json`: what a running stack tells other commands about itself."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from services.embedded.files import write_private

FILE: Final = "stack.json"


@dataclass(frozen=True, kw_only=True)
class StackInfo:
    """Addresses (passwords included, so the file is 0600) and processes of a running stack."""

    nats_url: str
    database_url: str
    gateway_url: str
    pids: dict[str, int]
    version: str


def announce(data_dir: Path, info: StackInfo) -> None:
    """Write `stack.json` atomically, mode 0600."""
    write_private(data_dir / FILE, json.dumps(asdict(info), indent=2) + "\n")


def withdraw(data_dir: Path) -> None:
    """Remove `stack.json`. Idempotent."""
    (data_dir / FILE).unlink(missing_ok=True)


def discover(data_dir: Path) -> StackInfo | None:
    """The stack that runs on `data_dir`; None when there is none (or a killed one left a file that says nothing)."""
    try:
        values = json.loads((data_dir / FILE).read_text(encoding="utf-8"))
        info = StackInfo(
            nats_url=str(values["nats_url"]),
            database_url=str(values["database_url"]),
            gateway_url=str(values["gateway_url"]),
            pids={str(name): int(pid) for name, pid in values["pids"].items()},
            version=str(values["version"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return info if _alive(info.pids.get("stack")) else None


def _alive(pid: int | None) -> bool:
    if pid is None or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it lives, under another user
    return True
